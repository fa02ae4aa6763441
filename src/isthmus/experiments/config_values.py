"""Values of settings: from TOML and the command line to the declared types, and back."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from isthmus.errors import ConfigError, unknown


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """A TOML file written by a user; ``what`` names it in errors."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {what}{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        twice = "Cannot overwrite" in str(error) or "Cannot declare" in str(error)
        hint = "; a key and a [table] cannot share a name: write settings as plain keys, without [method]"
        raise ConfigError(f"{what}{path} is not valid TOML: {error}{hint if twice else ''}") from None
    except RecursionError:
        raise ConfigError(f"{what}{path} is not valid TOML: it is nested too deeply") from None


def parse_override(text: str) -> tuple[str, Any]:
    """``key=value`` from the command line; the value is read as TOML where it is TOML, else as a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def coerce(value: Any, hint: Any, key: str) -> Any:
    """A value of the declared type, or a ConfigError that says what is allowed. Strings from the command line are
    parsed.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise unknown(f"value for {key}", str(value), map(str, arguments))
        return value
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return coerce(value, next(a for a in arguments if a is not type(None)), key)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        return tuple(coerce(item, arguments[0], key) for item in items if item != "")
    if hint is bool:
        return _boolean(value, key)
    try:
        if hint is int and not isinstance(value, bool) and (isinstance(value, str) or value == int(value)):
            return int(value)
        if hint is float and not isinstance(value, bool):
            number = float(value)
            if number == number and abs(number) != float("inf"):
                return number
        if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{key} must be {_TYPE_NAMES.get(hint, hint)}, got {value!r}")


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _boolean(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"{key} must be true or false, got {value!r}")


@functools.cache  # reading annotations is most of the cost of resolving settings
def keys_of(config: type) -> dict[str, tuple[str, Any]]:
    """Keys of a config: key -> (field name, type)."""
    hints = get_type_hints(config)
    return {f.metadata.get("key", f.name): (f.name, hints[f.name]) for f in dataclasses.fields(config)}


def plain(config: Any) -> dict[str, Any]:
    """A config as TOML can hold it, by key."""
    values = {f.metadata.get("key", f.name): getattr(config, f.name) for f in dataclasses.fields(config)}
    return {
        key: list(value) if isinstance(value, tuple) else "none" if value is None else value
        for key, value in values.items()
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dots in the keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found

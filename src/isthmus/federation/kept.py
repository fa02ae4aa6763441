"""What of a party's state goes into its model package beside the weights, as bytes (safetensors with a JSON header)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from isthmus.federation import codec
from isthmus.federation.codec import Limits
from isthmus.federation.roles import Client
from isthmus.records import Record, make_record

LIMITS = Limits(max_bytes=2**40, max_tensors=10**7, max_header=2**30)
"""A package is its owner's own file."""


def fields_bytes(state: Record, names: tuple[str, ...]) -> bytes:
    """Some fields of a state; nothing where there are none."""
    if not names:
        return b""
    return codec.encode(_record_type(type(state), names)(**{name: getattr(state, name) for name in names}))


def read_fields(data: bytes, state: type[Record], names: tuple[str, ...]) -> dict[str, Any]:
    """The inverse of :func:`fields_bytes`."""
    if not names:
        return {}
    record = codec.decode(data, _record_type(state, names), LIMITS)
    return {name: getattr(record, name) for name in names}


def _record_type(state: type[Record], names: tuple[str, ...]) -> type[Record]:
    hints = get_type_hints(state)
    return make_record("Kept", **{name: hints[name] for name in names})


def kept_names(cls: type[Client[Any, Any]]) -> tuple[str, ...]:
    """Fields a class keeps, in the order they are written."""
    return (*cls.keeps, *cls.keeps_of_data)


def kept_bytes(client: Client[Any, Any]) -> bytes:
    """What a party keeps."""
    return fields_bytes(client.state, kept_names(type(client)))


def restore_kept(client: Client[Any, Any], weights: Mapping[str, Any], data: bytes, *, as_trained: bool) -> None:
    """Make a fresh party the one that wrote these weights and bytes."""
    cls = type(client)
    kept = read_fields(data, type(client.initial_state()), kept_names(cls))
    chosen = kept_names(cls) if as_trained else cls.keeps
    client.restore(weights, {name: kept[name] for name in chosen}, as_trained=as_trained)

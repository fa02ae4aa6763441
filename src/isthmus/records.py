"""Records: frozen dataclasses that can be written down. State of a party, of the server, of an optimiser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """Serialisable state: tensors (dense, CSR), numbers, bool, None, strings, bytes, tuples, string-keyed maps,
    records.
    """


def make_record(name: str, **annotations: object) -> type[Record]:
    """A record type made at run time, for state whose parts are only known then (e.g. a checkpoint of some method's
    state).
    """
    body = {"__annotations__": annotations, "__module__": __name__}
    return dataclass(frozen=True)(type(name, (Record,), body))

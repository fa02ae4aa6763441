"""Central (also Global): one model on the union of all data, cross edges included. The upper reference, not a
federation.

It is Local with one client that owns everything.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.methods import local
from isthmus.methods.registry import register

METHOD = register(
    replace(
        local.METHOD,
        name="central",
        summary="one model on the union of all data (upper reference)",
        reference="no paper; Global in others' tables",
        pooled=True,
    )
)

"""HiFGL's share holders between organisations: a server that carries their keys cannot put in its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from test_methods_between_sites import SitePerClient

from isthmus.errors import IsthmusError
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.host import FrameKind
from isthmus.federation.interface import Failure
from isthmus.federation.party import Invocation
from isthmus.federation.secure import Sealed
from isthmus.federation.wire import Frame, decode_calls, encode_calls
from isthmus.methods.hifgl.hardened import HolderKey
from isthmus.privacy.edge_keys import KeyHolder
from isthmus.testing import small_runs


class SubstitutingServer(SitePerClient):
    """Puts a key of its own in the place of every silo's."""

    def __init__(self, parts: Mapping[str, Any], table: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(parts, table, *arguments, **more)
        self.table, self.seen = table, set[str]()

    def carry(self, kind: FrameKind, frames: Mapping[str, Frame], timeout: float | None) -> dict[str, Frame | Failure]:
        if kind == "call":
            frames = {
                site: encode_calls(self._changed(decode_calls(frame, self.table))) for site, frame in frames.items()
            }
        return super().carry(kind, frames, timeout)

    def _changed(self, calls: list[Invocation]) -> list[Invocation]:
        own = HolderKey(KeyHolder(b"isthmus/hifgl/client-0").public)
        changed = []
        for call in calls:
            if call.handler == "take_holders":
                self.seen |= {type(parcel.content).__name__ for parcel in call.parcels or ()}
                call = replace(call, parcels=tuple(replace(parcel, content=own) for parcel in call.parcels or ()))
            changed.append(call)
        return changed


def test_holder_keys_come_sealed_from_their_silos_and_others_are_refused() -> None:
    settings, scenario = next(iter(small_runs("hifgl").values()))
    with SimulatedRun(settings, scenario, engine=SubstitutingServer) as run:
        with pytest.raises(IsthmusError, match="take_holders"):
            run.loop.play()
        assert run.engine.seen == {Sealed.__name__}  # type: ignore[attr-defined]

"""A hostile server job: it sends a site requests our server never would, and writes down the answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from isthmus.deploy.handshake import BEGIN, CALL, KEYS, ORDER, BeginRun, JoinReply, PeerKeys
from isthmus.deploy.processes import exit_with_parent
from isthmus.experiments.folder import NO_RUN
from isthmus.experiments.result import versions
from isthmus.federation import codec
from isthmus.federation.host import Answer, Order
from isthmus.federation.messages import PartyId
from isthmus.federation.party import Invocation, Turn
from isthmus.federation.wire import encode_calls, pack, unpack

FOLDER = "HOSTILE_FOLDER"
OVERSIZED = 5 * 2**20


class HostileServer:
    def __init__(self) -> None:
        exit_with_parent()

    @collab.main
    def main(self) -> str:
        folder = Path(os.environ[FOLDER])
        site = next(proxy for proxy in collab.clients)
        found: dict[str, Any] = {}
        settings = (folder / "config.toml").read_text()

        def ask(name: str, kind: str, data: bytes, run: str = "hostile") -> None:
            found[name] = _answer(bytes(site(timeout=120.0).handle(run=run, kind=kind, data=data)))

        def call(party: PartyId, handler: str, role: str = "client") -> bytes:
            return pack(encode_calls([Invocation(party, role, handler, Turn(0, "train", 1, 1), 1)]))

        begin = BeginRun("hostile", NO_RUN, 0, settings, versions())
        ask("a call before the run began", CALL, call("client-0", "evaluate"))
        ask(
            "another version",
            BEGIN,
            pack((codec.encode(BeginRun("hostile", NO_RUN, 0, settings, {**versions(), "isthmus": "9.9"})),)),
        )
        ask("a damaged config", BEGIN, pack((codec.encode(BeginRun("hostile", NO_RUN, 0, "[run", versions())),)))
        ask("a path for a name", BEGIN, pack((codec.encode(begin),)), run="../../etc")
        begun = bytes(site(timeout=120.0).handle(run="hostile", kind=BEGIN, data=pack((codec.encode(begin),))))
        found["begin"], joined = _answer(begun), codec.decode(unpack(begun)[0], JoinReply)
        ask("keys", KEYS, pack((codec.encode(PeerKeys(joined.keys or {}, joined.heads or {})),)))
        ask("unknown handler", CALL, call("client-0", "initial_state"))
        ask("unknown role", CALL, call("client-0", "evaluate", role="device"))
        ask("somebody else's party", CALL, call("client-2", "evaluate"))
        ask("unknown order", ORDER, pack((codec.encode(Order("shell")),)))
        ask("unknown kind", "eval", pack((codec.encode(Order("tags")),)))
        ask("another run", ORDER, pack((codec.encode(Order("tags")),)), run="other")
        ask("malformed", CALL, b"\x00" * 100)
        ask("pickle", CALL, b"\x80\x04\x95cposix\nsystem\n.")
        ask("truncated", CALL, call("client-0", "evaluate")[:-3])
        ask("oversized", BEGIN, b"\x00" * OVERSIZED)
        try:
            site(timeout=20.0).shutdown()
            found["unpublished function"] = "answered"
        except Exception as error:
            found["unpublished function"] = f"refused: {type(error).__name__}"
        ask("still there", ORDER, pack((codec.encode(Order("tags")),)))
        (folder / "answers.json").write_text(json.dumps(found))
        return "done"


def _answer(data: bytes) -> str:
    frame = unpack(data)
    for kind in (Answer, JoinReply):
        try:
            answer = codec.decode(frame[0], kind)
            return f"{answer.error}: {answer.text}" if answer.error else "fine"
        except Exception:
            continue
    return "something else"

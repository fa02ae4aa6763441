"""What owners do together before the first round, in one process: scaling by sums, links by intersection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pl = pytest.importorskip("polars", reason="needs the extra tables")
pytest.importorskip("private_set_intersection", reason="needs the extra tables")

from isthmus.data.tables.owner import OwnerTables, read_owner  # noqa: E402
from isthmus.federation.engines.local import LocalEngine  # noqa: E402
from isthmus.federation.interface import QuorumError  # noqa: E402
from isthmus.federation.session import Session  # noqa: E402
from isthmus.preparation.owner import PreparationConfig  # noqa: E402
from isthmus.preparation.prepared import prepared  # noqa: E402
from isthmus.preparation.rounds import TABLE, TABLES, agree_on_scaling, link_owners  # noqa: E402
from isthmus.seeds import Stream  # noqa: E402

SCHEMA = """
[nodes]
file = "accounts.*"
id = "id"
label = "y"
classes = ["0", "1"]
split = "stratified:40/20/40"
[features]
size = { type = "number" }
[edges]
file = "transfers.*"
source = "from"
target = "to"
directed = DIRECTED
[edges.features]
in_count = true
"""


def network(
    root: Path, *, directed: bool = True, forget: float = 0.0
) -> tuple[dict[str, OwnerTables], set[tuple[str, str]]]:
    """Three banks; returns their tables and the edges between banks that both ends list."""
    draw = np.random.default_rng(1)
    names = [f"acc-{i}" for i in range(90)]
    bank = {name: f"bank-{i % 3}" for i, name in enumerate(names)}
    pairs = {(a, b) for a, b in (draw.choice(names, 2, replace=False).tolist() for _ in range(400))}
    if not directed:
        pairs = {(min(pair), max(pair)) for pair in pairs}
    agreed, tables = {pair for pair in pairs if bank[pair[0]] != bank[pair[1]]}, {}
    for number in range(3):
        folder = root / f"bank-{number}"
        folder.mkdir(parents=True)
        mine = [name for name in names if bank[name] == folder.name]
        rows = sorted(pair for pair in pairs if folder.name in (bank[pair[0]], bank[pair[1]]))
        lost = [pair for pair in rows if pair in agreed and draw.random() < forget]
        agreed -= set(lost)
        rows = [pair for pair in rows if pair not in lost] + [(mine[0], "nobody-knows")]
        (folder / "schema.toml").write_text(SCHEMA.replace("DIRECTED", str(directed).lower()))
        pl.DataFrame(
            {"id": mine, "y": [i % 2 for i in range(len(mine))], "size": draw.normal(50, 9, len(mine))}
        ).write_csv(folder / "accounts.csv")
        pl.DataFrame(rows, schema=["from", "to"], orient="row").write_csv(folder / "transfers.csv")
        tables[folder.name] = read_owner(folder, folder.name, seed=0)
    return tables, agreed


def prepare(
    tables: dict[str, OwnerTables], *, secure: bool = False, link: Any = "psi", **config: object
) -> tuple[LocalEngine, Session]:
    engine = LocalEngine(tables, TABLES[link], PreparationConfig(**config), Stream(0))  # type: ignore[arg-type]
    session = Session(engine, TABLES[link], secure=secure)
    session.clock.begin("scaling", 1, 1)
    agree_on_scaling(session)
    session.clock.begin("linking", 1, 2)
    link_owners(session, link)
    return engine, session


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("link", ["psi", "plain"])
def test_both_ends_end_with_the_edges_both_list(link: str, directed: bool, tmp_path: Path) -> None:
    tables, agreed = network(tmp_path, directed=directed, forget=0.2)
    engine, _ = prepare(tables, link=link)
    text = {}
    data = {}
    for name, owned in tables.items():
        data[name] = prepared(owned, engine.party(name).client.state)
        text |= dict(zip(data[name].node_id.tolist(), owned.ids.to_list(), strict=True))
    arcs = set()
    for name, part in data.items():
        for own, owner, other, out in zip(
            part.cross.own, part.cross.owner, part.cross.other, part.cross.outgoing, strict=True
        ):
            ends = text[int(part.node_id[own])], text[int(other)]
            assert int(other) in data[part.cross.owners[int(owner)]].node_id.tolist()
            arcs.add((name, *(ends if out else ends[::-1])))
    bank = {one: name for name, owned in tables.items() for one in owned.ids.to_list()}
    both_ways = agreed if directed else agreed | {pair[::-1] for pair in agreed}
    assert arcs == {(bank[end], *pair) for pair in both_ways for end in pair}


def test_counts_are_shown_to_the_owner_and_sent_to_nobody(tmp_path: Path) -> None:
    tables, agreed = network(tmp_path, forget=0.3)
    engine, session = prepare(tables)
    counts = {name: engine.party(name).client.counts() for name in tables}
    assert sum(count.agreed for found in counts.values() for count in found.values()) == 2 * len(agreed)
    assert all(count.only_here > 0 for found in counts.values() for count in found.values())
    entries = session.ledger.take()
    assert {entry.message for entry in entries if entry.phase == "linking" and "server" in entry.receiver} == set()


def test_masked_and_plain_sums_give_the_same_features(tmp_path: Path) -> None:
    tables, _ = network(tmp_path)
    plain, _ = prepare(tables, link="plain")
    masked, session = prepare(tables, secure=True, link="plain")
    for name, owned in tables.items():
        a, b = (prepared(owned, engine.party(name).client.state).x for engine in (plain, masked))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    up = [entry for entry in session.ledger.take() if entry.phase == "scaling" and "server" in entry.receiver]
    assert up and {entry.protection for entry in up} == {"masked"}


def test_a_cap_on_the_size_of_sets_stops_the_run(tmp_path: Path) -> None:
    tables, _ = network(tmp_path)
    with pytest.raises(QuorumError, match=r"raise link\.max_ids in \[policy\]"):
        prepare(tables, max_ids=10)


def test_a_node_that_two_partners_claim_stops_the_run(tmp_path: Path) -> None:
    tables, _ = network(tmp_path)
    for name in ("bank-1", "bank-2"):  # both now say that acc-x is theirs, and list the transfer from bank-0's acc-0
        folder = tmp_path / name
        with (folder / "accounts.csv").open("a") as file:
            file.write("acc-x,1,3.0\n")
        with (folder / "transfers.csv").open("a") as file:
            file.write("acc-0,acc-x\n")
    with (tmp_path / "bank-0" / "transfers.csv").open("a") as file:
        file.write("acc-0,acc-x\n")
    tables = {name: read_owner(tmp_path / name, name, seed=0) for name in tables}
    with pytest.raises(QuorumError, match="two partners claim the same node"):
        prepare(tables)


def test_owners_with_different_link_keys_do_not_link(tmp_path: Path) -> None:
    tables, _ = network(tmp_path)
    engine, _ = prepare(tables, key=b"k" * 32)
    state = engine.party("bank-0").client.state
    again, _ = prepare(tables, key=b"k" * 32)
    assert torch.equal(
        prepared(tables["bank-0"], state).node_id,
        prepared(tables["bank-0"], again.party("bank-0").client.state).node_id,
    )
    drawn, _ = prepare(tables)
    assert not torch.equal(
        prepared(tables["bank-0"], state).node_id,
        prepared(tables["bank-0"], drawn.party("bank-0").client.state).node_id,
    )


def test_the_sheet_calls_edges_in_the_clear_structure_and_an_organisation_cannot_show_them(tmp_path: Path) -> None:
    tables, _ = network(tmp_path)
    kinds = {}
    for link in ("psi", "plain"):
        _, session = prepare(tables, link=link)
        entries = [entry for entry in session.ledger.take() if entry.phase == "linking"]
        kinds[link] = {entry.message: set(entry.kinds.values()) for entry in entries}
    assert kinds["plain"]["ListedEdges"] == {"structure"} and "LinkRequest" not in kinds["plain"]
    assert kinds["psi"]["LinkRequest"] == {"ciphertext"} and "ListedEdges" not in kinds["psi"]
    assert "show_edges" not in TABLE.handlers["client"]  # what a site runs

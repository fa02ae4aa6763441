"""The audit chain: no line can be changed, removed, inserted, swapped or cut off unnoticed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.deploy import audit_chain
from isthmus.deploy.audit_chain import AUDIT, CALL, END, INDEX, JOIN, AuditChain, Head, verify
from isthmus.errors import DataError, RunError


def join(chain: AuditChain, run: str = "r", mark: str = "m", **more: Any) -> None:
    chain.append(
        JOIN, **{"run": run, "mark": mark, "stage": "run", "contract": "c", "epsilon": 0.0, "delta": 0.0} | more
    )


def filled(state: Path, calls: int = 6) -> AuditChain:
    chain = AuditChain(state).open()
    join(chain)
    for number in range(calls):
        chain.append(CALL, run="r", handler="local_update", count=number)
    return chain


def lines(state: Path) -> list[bytes]:
    return (state / AUDIT).read_bytes().splitlines(keepends=True)


def write(state: Path, content: list[bytes]) -> None:
    (state / AUDIT).write_bytes(b"".join(content))


def test_lines_are_numbered_and_linked(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    records = [json.loads(line) for line in lines(tmp_path)]
    assert [record["number"] for record in records] == list(range(1, 8))
    assert records[0]["prev"] == audit_chain.FIRST and len({record["prev"] for record in records}) == 7
    assert verify(tmp_path) == chain.head == AuditChain(tmp_path).open().head
    assert oct((tmp_path / AUDIT).stat().st_mode & 0o777) == "0o600"


def changed(content: list[bytes]) -> list[bytes]:
    return [*content[:3], content[3].replace(b'"count":2', b'"count":9'), *content[4:]]


def removed(content: list[bytes]) -> list[bytes]:
    return [*content[:3], *content[4:]]


def inserted(content: list[bytes]) -> list[bytes]:
    return [*content[:3], content[3], *content[3:]]


def swapped(content: list[bytes]) -> list[bytes]:
    return [*content[:3], content[4], content[3], *content[5:]]


def without_first(content: list[bytes]) -> list[bytes]:
    return content[1:]


def blank(content: list[bytes]) -> list[bytes]:
    return [*content[:3], b"\n", *content[3:]]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("attack", [changed, removed, inserted, swapped, without_first, blank])
def test_a_tampered_chain_is_refused(
    tmp_path: Path, attack: Callable[[list[bytes]], list[bytes]], indexed: bool
) -> None:
    chain = filled(tmp_path)
    if indexed:
        chain.append(END, run="r", mark="m")  # sums up
    else:
        (tmp_path / INDEX).unlink()
    write(tmp_path, attack(lines(tmp_path)))
    with pytest.raises(DataError, match="is broken") as error:
        AuditChain(tmp_path).open()
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"line \d does not follow|cannot be read"):
        verify(tmp_path)


def test_a_process_that_has_the_chain_open_notices_a_cut(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    write(tmp_path, lines(tmp_path)[:-1])
    with pytest.raises(DataError, match="lines were cut off its end"):
        chain.append(CALL, run="r")


def test_a_chain_shorter_than_its_index_was_cut(tmp_path: Path) -> None:
    filled(tmp_path).append(END, run="r", mark="m")
    write(tmp_path, lines(tmp_path)[:-2])
    with pytest.raises(DataError, match="it ends before line 8, which its index knows"):
        AuditChain(tmp_path).open()


def test_a_cut_end_is_found_with_a_kept_head(tmp_path: Path) -> None:
    kept = filled(tmp_path).head
    (tmp_path / INDEX).unlink()
    assert AuditChain(tmp_path).open().has_head(kept.hash) == kept.number
    write(tmp_path, lines(tmp_path)[:-1])
    assert AuditChain(tmp_path).open().has_head(kept.hash) is None


def test_a_chain_rewritten_as_a_whole_is_not_the_one_of_its_index(tmp_path: Path) -> None:
    filled(tmp_path).append(END, run="r", mark="m")
    chain = AuditChain(tmp_path / "other").open()
    for number in range(30):
        chain.append(CALL, run="x", count=number)
    (tmp_path / AUDIT).write_bytes((tmp_path / "other" / AUDIT).read_bytes())
    with pytest.raises(DataError, match="are not those its index was made from"):
        AuditChain(tmp_path).open()


@pytest.mark.parametrize("torn", [1, 20, -1])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: int) -> None:
    filled(tmp_path)
    content = lines(tmp_path)
    write(tmp_path, [*content[:-1], content[-1][:torn]])
    chain = AuditChain(tmp_path).open()
    assert chain.head.number == 6 and lines(tmp_path) == content[:-1]
    chain.append(CALL, run="r", count=5)
    assert lines(tmp_path) == [*content[:-1], lines(tmp_path)[-1]] and verify(tmp_path).number == 7


def test_two_processes_write_one_chain(tmp_path: Path) -> None:
    one, two = AuditChain(tmp_path).open(), AuditChain(tmp_path).open()
    for number in range(4):
        (one, two)[number % 2].append(CALL, run="r", count=number)
    join(two, epsilon=1.5)
    one.append(CALL, run="r", count=9)
    assert verify(tmp_path) == one.head and one.spent == (1.5, 0.0)


def test_a_full_disk_refuses_and_leaves_the_chain_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = filled(tmp_path)
    before = (tmp_path / AUDIT).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"cannot be written \(No space left on device\), so nothing is answered"):
            chain.append(CALL, run="r", count=1)
    assert (tmp_path / AUDIT).read_bytes() == before
    chain.append(CALL, run="r", count=1)
    assert verify(tmp_path).number == 8


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(RunError, match=r"cannot be opened .* so nothing is answered here"):
        AuditChain(tmp_path / "state").open()


def test_records_of_a_run_are_found_by_name_and_mark(tmp_path: Path) -> None:
    chain = AuditChain(tmp_path).open()
    for mark in ("m1", "m2"):
        join(chain, "r", mark)
        chain.append(CALL, run="r", mark=mark, count=mark)
        join(chain, "other", "m")
        chain.append(CALL, run="other", mark="m", count="other")
    join(chain, "r", "m1")
    chain.append(CALL, run="r", mark="m1", count="m1 again")
    found = [record.get("count") for record in AuditChain(tmp_path).open().records("r", "m1")]
    assert found == [None, "m1", None, "m1 again"]
    assert not list(chain.records("r", "m3"))


def test_what_runs_spent_is_remembered_with_and_without_the_index(tmp_path: Path) -> None:
    chain = AuditChain(tmp_path).open()
    join(chain, "a", "m", epsilon=1.0, delta=1e-6)
    join(chain, "b", "m", epsilon=0.5, delta=1e-6)
    join(chain, "a", "m")  # continued: costs nothing
    assert AuditChain(tmp_path).open().spent == (1.5, 2e-6) and len(chain.runs) == 2
    (tmp_path / INDEX).unlink()
    assert AuditChain(tmp_path).open().spent == (1.5, 2e-6)
    (tmp_path / INDEX).write_text("{")
    assert AuditChain(tmp_path).open().runs == chain.runs


def test_lines_before_the_index_are_not_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, calls=50).append(END, run="r", mark="m")
    seen: list[bytes] = []
    check = AuditChain._check
    monkeypatch.setattr(AuditChain, "_check", lambda self, line: (seen.append(line), check(self, line))[1])
    assert AuditChain(tmp_path).open().head.number == 52 and not seen
    (tmp_path / INDEX).unlink()
    assert AuditChain(tmp_path).open().head.number == 52 and len(seen) == 52


def test_a_long_chain_is_summed_up_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_chain, "_INDEXED", 4)
    chain = filled(tmp_path, calls=9)
    assert json.loads((tmp_path / INDEX).read_bytes())["head"]["number"] == 9
    assert AuditChain(tmp_path).open().head == chain.head


def test_no_chain_yet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this site has joined no run yet"):
        verify(tmp_path)
    assert AuditChain(tmp_path).open().head == Head()


NEARLY_FULL = """
import resource, signal, sys
from pathlib import Path
from isthmus.deploy.audit_chain import AuditChain
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
chain = AuditChain(Path(sys.argv[1])).open()
size = chain.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, size + 40))
chain.append("order", name="rollback", step=3)
"""


def test_a_line_that_fits_only_in_part_is_not_written(tmp_path: Path) -> None:
    """A disk that is nearly full takes the beginning of a line without an error."""
    filled(tmp_path)
    before = (tmp_path / AUDIT).read_bytes()
    done = subprocess.run([sys.executable, "-c", NEARLY_FULL, str(tmp_path)], capture_output=True, text=True)
    assert "cannot be written (No space left on device)" in done.stderr
    assert (tmp_path / AUDIT).read_bytes() == before
    assert verify(tmp_path).number == 7


APPENDS = """
import sys
from pathlib import Path
from isthmus.deploy.audit_chain import AuditChain
chain = AuditChain(Path(sys.argv[1])).open()
for number in range(200):
    chain.append("order", name=sys.argv[2], step=number)
"""


def test_two_processes_append_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "kept")  # a state folder may be a link
    state = tmp_path / "state"
    both = [subprocess.Popen([sys.executable, "-c", APPENDS, str(state), name]) for name in ("a", "b")]
    assert [process.wait(120) for process in both] == [0, 0]
    assert verify(state).number == 400
    found = [(record["name"], record["step"]) for record in AuditChain(state).open().read()]
    assert sorted(found) == [(name, step) for name in ("a", "b") for step in range(200)]

"""The live page of a run, without a browser."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path

import pytest
from fake_runs import write_run

from isthmus.cli.watch import HOST, serve
from isthmus.errors import DataError
from isthmus.report.live import live_page


def test_a_run_before_in_and_after_its_rounds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "<b>bad", rounds=50)
    assert "finished" in live_page(folder) and 'http-equiv="refresh"' not in live_page(folder)
    (folder / "result.json").unlink()
    page = live_page(folder)
    assert (
        "round 50 of 50" in page and 'http-equiv="refresh"' in page and "<b>bad" not in page and "&lt;b&gt;bad" in page
    )
    (folder / "metrics.jsonl").unlink()
    assert "setting up" in live_page(folder) and "Nothing is evaluated yet" in live_page(folder)
    with pytest.raises(DataError, match=r"not a run folder .*the newest in it is .*run"):
        serve(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"not a run folder .*start one with `isthmus run`"):
        serve(tmp_path / "empty")


def test_only_this_machine_and_only_the_page(tmp_path: Path) -> None:
    server = serve(write_run(tmp_path / "run"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert server.server_address[0] == "127.0.0.1"

        def status(path: str, host: str | None = None) -> int:
            connection = http.client.HTTPConnection(HOST, server.server_address[1])
            connection.request("GET", path, headers={"Host": host} if host else {})
            return connection.getresponse().status

        assert [status("/"), status("/result.json"), status("/../config.toml")] == [200, 404, 404]
        assert status("/", "attacker.example:80") == 404  # a name that was made to point here
    finally:
        server.shutdown()
        server.server_close()

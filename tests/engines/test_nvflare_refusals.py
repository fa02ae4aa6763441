"""What a federation refuses, tried on real processes; where it matters, the same attack succeeds on a site without our
protection.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from hostile_app import FOLDER
from nvflare_helpers import ABSENT, SUPER, settings_of, wait_until

from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.job_template import CLIENT_CONFIG, RUNS, SERVER_CONFIG, SERVER_JOB, SITE_SETTINGS, write_job
from isthmus.deploy.loopback import LoopbackFederation
from isthmus.deploy.processes import descendants, terminate
from isthmus.deploy.provisioning import SERVER_KIT
from isthmus.deploy.startup_kit import StartupKit

HERE = Path(__file__).parent


# -- who may connect -------------------------------------------------------------------------------


def _accepts(federation: LoopbackFederation, certificate: Path | None, key: Path | None) -> bool:
    """Whether the server accepts a connection with this certificate: its first HTTP/2 frame comes after the TLS
    handshake.
    """
    kit = federation.kits[SERVER_KIT]
    context = ssl.create_default_context(cafile=str(kit.startup / "rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    try:
        with (
            socket.create_connection(kit.target, timeout=10.0) as plain,
            context.wrap_socket(plain, server_hostname=kit.target[0]) as tls,
        ):
            tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return bool(tls.recv(9))
    except (ssl.SSLError, ConnectionError):
        return False


def _self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
    )
    certificate = (
        builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    )
    (folder / "own.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "own.key").write_bytes(private)
    return folder / "own.crt", folder / "own.key"


def test_only_provisioned_certificates_connect(federation: LoopbackFederation, tmp_path: Path) -> None:
    startup = federation.kits["site-1"].startup
    wait_until(lambda: _accepts(federation, startup / "client.crt", startup / "client.key"))
    assert not _accepts(federation, None, None)
    assert not _accepts(federation, *_self_signed(tmp_path, "site-1"))


def test_one_kit_cannot_impersonate_another(federation: LoopbackFederation, tmp_path: Path) -> None:
    """An organisation starts the library itself, with its own certificate and the name of another."""
    copy = tmp_path / "kit"
    shutil.copytree(federation.kits["site-1"].path, copy, ignore=shutil.ignore_patterns("*.log", "site-1", "*.fl"))
    path = copy / "startup" / "fed_client.json"
    path.write_text(path.read_text().replace('"site-1"', f'"{ABSENT}"'))
    module = "nvflare.private.fed.app.client.client_train"
    command = [
        sys.executable,
        "-P",
        "-m",
        module,
        "-m",
        str(copy),
        "-s",
        "fed_client.json",
        "--set",
        "secure_train=true",
        f"uid={ABSENT}",
        f"org={ABSENT}",
        "config_folder=config",
    ]
    log = federation.state / SERVER_KIT / "log.txt"
    with _process(command, tmp_path / "out.txt"):
        wait_until(
            lambda: f"claimed endpoint '{ABSENT}' requires identity '{ABSENT}'" in log.read_text(errors="replace")
        )
    with AdminSession(federation.coordinator) as admin:
        assert ABSENT not in admin.sites()
        wait_until(lambda: set(federation.names) <= set(admin.sites()))


# -- which jobs run --------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(
    command: list[str], out: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with out.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **(environment or {})}, start_new_session=True
        )
    try:
        yield process
    finally:
        terminate([process.pid, *descendants(process.pid)])
        process.wait()


class DishonestFederation:
    """A federation whose server accepts all jobs and sends any request. ``guarded`` is a site of ours, ``bare`` one
    without our protections.
    """

    def __init__(self, federation: LoopbackFederation, folder: Path) -> None:
        self.federation, self.folder = federation, folder
        self.guarded, self.bare = federation.names

    def submit(self, job: Path, kit: StartupKit) -> tuple[str, str]:
        """Final status of a job, and what was said when it was deployed."""
        with AdminSession(kit) as admin:
            wait_until(lambda: _or_none(admin.sites) == list(self.federation.names))
            job_id = admin.call("submit_job", str(job))
            status = wait_until(lambda: (s := str(admin.call("get_job_status", job_id))).startswith("FINISHED") and s)
            # The server reports that it failed a little before it reports why.
            return status, str(wait_until(lambda: admin.call("get_job_meta", job_id).get("job_deploy_detail")))

    def order(self, site: str, topic: str, body: str) -> str:
        """What a site's parent process answers to the server."""
        (self.folder / ".order.json").write_text(json.dumps({"site": site, "topic": topic, "body": body}))
        (self.folder / ".order.json").rename(self.folder / "order.json")
        text: str = json.loads(
            wait_until((self.folder / "reply.json").exists) and (self.folder / "reply.json").read_text()
        )["text"]
        (self.folder / "reply.json").unlink()
        return text


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        return None


@pytest.fixture(scope="module")
def dishonest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DishonestFederation]:
    folder = tmp_path_factory.mktemp("dishonest")
    made = LoopbackFederation(
        2, folder / "runs", folder / "state", [{"name": SUPER, "type": "admin", "org": "loopback", "role": "super"}]
    )
    try:
        _remove_protections(made.kits[SERVER_KIT])
        _remove_protections(made.kits["site-2"])
        (folder / "config.toml").write_text(_config())
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {FOLDER: str(folder), "PYTHONPATH": paths, RUNS: str(folder / "runs")}
        command = [
            sys.executable,
            "-P",
            "-u",
            str(HERE / "hostile_server.py"),
            str(made.kits[SERVER_KIT].path),
            str(folder),
        ]
        bare = made.kits["site-2"]
        unguarded = [
            sys.executable,
            "-P",
            "-u",
            "-m",
            "nvflare.private.fed.app.client.client_train",
            "-m",
            str(bare.path),
            "-s",
            "fed_client.json",
            "--set",
            "secure_train=true",
            f"uid={bare.name}",
            f"org={bare.organisation}",
            "config_folder=config",
        ]
        settings = {SITE_SETTINGS: str(made.folder / "site-2.toml"), "NVFLARE_TENSOR_DOWNLOAD_CHUNK_SIZE": "0"}
        with _process(command, folder / "server.txt", environment), _process(unguarded, folder / "bare.txt", settings):
            made.start_one("site-1")
            yield DishonestFederation(made, folder)
    finally:
        made.close()


def _remove_protections(kit: StartupKit) -> None:
    """Rules as lax as the library allows."""
    path = kit.local / "resources.json"
    resources = json.loads(path.read_text())
    del resources["app_validator"]
    resources["class_allow_list"] = [*resources["class_allow_list"], "hostile_app.HostileServer"]
    path.write_text(json.dumps(resources))
    lax = {
        "format_version": "1.0",
        "permissions": dict.fromkeys(("project_admin", "org_admin", "lead", "member"), "any"),
    }
    (kit.local / "authorization.json").write_text(json.dumps(lax))


def _config() -> str:
    from isthmus.deploy.loopback import _resolved
    from isthmus.experiments.scenarios import scenario_of

    settings = settings_of("fedavg", "nvflare")
    scenario = scenario_of(settings)
    return _resolved(settings, {name: getattr(scenario, name) for name in ("clients", "partition", "split")}).to_toml()


def _job(folder: Path, name: str, sites: list[str], change: Callable[[Path], None] = lambda app: None) -> Path:
    job = write_job(folder / name, ["hostile"], 0, sites)
    change(job / "app")
    return job


def _with_code(marker: Path) -> Callable[[Path], None]:
    """A component whose class comes with the job."""

    def change(app: Path) -> None:
        (app / "custom").mkdir()
        (app / "custom" / "evil.py").write_text(
            f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n\nclass Evil:\n    def __init__(self):\n        "
            "pass\n"
        )
        _add_component(app / "config" / CLIENT_CONFIG, "evil.Evil")

    return change


def _with_class(path: str, **arguments: Any) -> Callable[[Path], None]:
    return lambda app: _add_component(app / "config" / CLIENT_CONFIG, path, **arguments)


def _add_component(path: Path, cls: str, **arguments: Any) -> None:
    config = json.loads(path.read_text())
    config["components"].append({"id": "extra", "path": cls, "args": arguments})
    path.write_text(json.dumps(config))


def _server_job(cls: str) -> Callable[[Path], None]:
    def change(app: Path) -> None:
        path = app / "config" / SERVER_CONFIG
        path.write_text(path.read_text().replace(SERVER_JOB, cls))

    return change


@pytest.mark.parametrize("role", ["lead", "super"])
def test_a_job_that_carries_code(dishonest: DishonestFederation, role: str, tmp_path: Path) -> None:
    kit = dishonest.federation.coordinator if role == "lead" else dishonest.federation.kits[SUPER]
    job = _job(tmp_path, f"code-{role}", [dishonest.guarded], _with_code(tmp_path / "ran"))
    status, said = dishonest.submit(job, kit)
    assert "FAILED_TO_RUN" in status
    assert "isthmus job validator: folder custom not permitted" in said
    assert not (tmp_path / "ran").exists()


def test_the_same_code_runs_at_a_site_without_validator(dishonest: DishonestFederation, tmp_path: Path) -> None:
    job = _job(tmp_path, "code-bare", [dishonest.bare], _with_code(tmp_path / "ran"))
    dishonest.submit(job, dishonest.federation.kits[SUPER])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "cls",
    [
        "subprocess.Popen",
        "isthmus.deploy.process_supervisor.ProcessSupervisor",
        "nvflare.app_common.np.np_trainer.NPTrainer",
    ],
)
def test_a_job_that_names_another_class(dishonest: DishonestFederation, cls: str, tmp_path: Path) -> None:
    job = _job(tmp_path, "class", [dishonest.guarded], _with_class(cls, args=["touch", str(tmp_path / "ran")]))
    status, said = dishonest.submit(job, dishonest.federation.coordinator)
    assert "FAILED_TO_RUN" in status
    assert "the client config differs from the fixed template" in said
    assert not (tmp_path / "ran").exists()


def test_a_job_by_role_super(dishonest: DishonestFederation, tmp_path: Path) -> None:
    """Exactly our own job, but submitted with a role that passes all checks of the library."""
    status, said = dishonest.submit(_job(tmp_path, "super", [dishonest.guarded]), dishonest.federation.kits[SUPER])
    assert "FAILED_TO_RUN" in status
    assert "isthmus job validator: jobs of role super not permitted" in said


def test_another_server_job_is_refused(dishonest: DishonestFederation, tmp_path: Path) -> None:
    job = _job(tmp_path, "server-app", [dishonest.guarded], _server_job("hostile_app.HostileServer"))
    status, said = dishonest.submit(job, dishonest.federation.coordinator)
    assert "FAILED_TO_RUN" in status
    assert "the server config differs from the fixed template" in said


# -- what a site answers ---------------------------------------------------------------------------


def test_the_remote_shell(dishonest: DishonestFederation, tmp_path: Path) -> None:
    """A tampered server reads files at a site, even its private key; with our parent process it gets no answer."""
    (tmp_path / "customers.csv").write_text("iban,balance\n")
    for site, stolen in ((dishonest.bare, True), (dishonest.guarded, False)):
        key = dishonest.federation.kits[site].startup / "client.key"
        for path, content in ((tmp_path / "customers.csv", "iban,balance"), (key, key.read_text().strip())):
            assert (content in dishonest.order(site, "sys.shell", f"cat {path}")) is stolen


UNWANTED = [
    "sys.shell",
    "train.restart",
    "train.shutdown",
    "sys.configure_site_log",
    "sys.report_env",
    "train.delete_run",
]


@pytest.mark.parametrize("topic", UNWANTED)
def test_requests_that_no_job_needs_are_refused(dishonest: DishonestFederation, topic: str) -> None:
    assert "invalid_request" in dishonest.order(dishonest.guarded, topic, "ls")


def test_messages_of_a_hostile_server(dishonest: DishonestFederation, tmp_path: Path) -> None:
    """The job validator would refuse such a job; this site has none, so that the runtime behind it is tested."""
    job = _job(tmp_path, "hostile", [dishonest.bare], _server_job("hostile_app.HostileServer"))
    status, _ = dishonest.submit(job, dishonest.federation.coordinator)
    found = json.loads((dishonest.folder / "answers.json").read_text())
    assert found.pop("begin") == "fine"
    assert "keys came of 1 clients (client-1)" in found.pop("keys"), "a server cannot make up the others"
    # Without keys nothing is looked at any further; what follows them is tested in tests/federation/test_host.py.
    for name in (
        "unknown handler",
        "unknown role",
        "somebody else's party",
        "unknown order",
        "unknown kind",
        "still there",
    ):
        assert found.pop(name) == "ProtocolError: the parties have not exchanged keys yet", name
    assert "isthmus is 0.1.0 here and 9.9 at the server" in found.pop("another version")
    assert "is not open here" in found.pop("another run")
    assert "is not open here" in found.pop("a call before the run began")
    assert "config.toml is damaged" in found.pop("a damaged config")
    assert "a run cannot be called" in found.pop("a path for a name")
    assert "exceeds the limit" in found.pop("oversized")
    assert found.pop("unpublished function").startswith("refused")
    rest = {name: answer.partition(":")[0] for name, answer in found.items()}
    assert rest == dict.fromkeys(("malformed", "pickle", "truncated"), "ProtocolError")
    assert "COMPLETED" in status

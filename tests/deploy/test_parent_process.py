"""Requests of the server that the parent process of a client answers."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from unittest.mock import MagicMock
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.client import training_cmds
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_engine_internal_spec import ClientEngineInternalSpec
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.scheduler_cmds import StartJobProcessor

from isthmus.deploy import parent_process
from isthmus.deploy.job_template import AT_ONCE
from isthmus.deploy.parent_process import ALLOWED_REQUESTS, MAX_APP_BYTES, limit_jobs, restrict_requests
from isthmus.deploy.startup_kit import StartupKit

JOB = "76ca07c9-86b6-47a7-b5e9-63e265e30ff4"


def test_a_site_starts_no_more_jobs_than_its_owner_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server asks for: one that deploys many jobs first and then starts them at once, say."""
    started: list[object] = []
    monkeypatch.setattr(StartJobProcessor, "process", lambda self, request, context: started.append(request))
    monkeypatch.setenv(AT_ONCE, "2")
    running = [11]
    monkeypatch.setattr(parent_process, "jobs_of", lambda pid: running)
    limit_jobs()
    request = Message(topic="start", body="")
    assert StartJobProcessor().process(request, None) is None and started == [request]
    running.append(12)
    answer = StartJobProcessor().process(request, None)
    assert len(started) == 1 and "it runs 2 at once, its limit" in answer.body
    running.pop()
    StartJobProcessor().process(request, None)
    assert len(started) == 2


def test_only_requests_a_job_needs_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(ClientRequestProcessors.request_processors))
    restrict_requests()
    kept = {type(processor).__name__ for processor in ClientRequestProcessors.request_processors}
    assert kept == ALLOWED_REQUESTS, "check what a new or missing processor does"


def archive(content: bytes) -> bytes:
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as file:
        file.writestr("config/config_fed_client.json", content)
    return packed.getvalue()


@pytest.fixture
def deploy(kits: dict[str, StartupKit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Sends a job to a site's parent process, as a hub that holds the coordinator's key does; ``deployed`` says what
    the library was given.
    """
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", [training_cmds.DeployProcessor()])
    monkeypatch.setattr(training_cmds, "require_signed_jobs", lambda *_: False)
    shutil.copytree(kits["bank-a"].path, tmp_path / "kit")
    engine = MagicMock(spec=ClientEngineInternalSpec)
    engine.args = MagicMock(workspace=str(tmp_path / "kit"))
    engine.get_client_name.return_value = "bank-a"
    engine.get_component = engine.new_context = MagicMock(return_value=None)
    engine.deploy_app.side_effect = lambda **given: ClientEngine.deploy_app(engine, **given)
    restrict_requests()
    (processor,) = ClientRequestProcessors.request_processors

    def send(job: object, body: object) -> str:
        request = Message(topic=TrainingTopic.DEPLOY, body=body)
        headers = {RequestHeader.JOB_ID: job, RequestHeader.JOB_META: {"x": 1}, RequestHeader.APP_NAME: "app"}
        for key, value in headers.items():
            request.set_header(key, value)
        return str(processor.process(request, engine).body)

    return MagicMock(side_effect=send, deployed=engine.deploy_app, kit=tmp_path / "kit")


@pytest.mark.parametrize("job", ["startup", "local", "..", f"{JOB}/../startup", f"{JOB}\n", 7])
def test_a_job_cannot_take_the_place_of_a_folder_of_the_kit(deploy: MagicMock, job: object) -> None:
    before = sorted(deploy.kit.rglob("*"))
    answer = deploy(job, archive(b"{}"))
    assert sorted(deploy.kit.rglob("*")) == before, "the key and the rules of the site are still there"
    assert "no job can be called so" in answer


@pytest.mark.parametrize(
    "body", [b"x" * (MAX_APP_BYTES + 1), archive(bytes(64 * MAX_APP_BYTES)), b"no archive", "text"]
)
def test_a_job_that_would_fill_the_disk(deploy: MagicMock, body: object) -> None:
    assert "the job is" in deploy(JOB, body) and not deploy.deployed.called


def test_an_honest_job_gets_as_far_as_the_validator(deploy: MagicMock) -> None:
    deploy(JOB, archive(b"{}"))
    assert deploy.deployed.called

"""Checks a job before anything of it is built, and refuses every job but the one in ``job_template``.

NVIDIA FLARE calls it in each parent process (server and clients) when a job is deployed, whatever role the submitter
has: the library's own permissions and class lists are skipped for the role ``super`` and for jobs that carry code. The
reason of a refusal reaches the submitter (``job_deploy_detail``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.x509.oid import NameOID
from nvflare.apis.app_validation import AppValidator

from isthmus.deploy.job_template import (
    AT_ONCE,
    CLIENT_CONFIG,
    REFUSED,
    SERVER_CONFIG,
    busy,
    client_config,
    parse_server_config,
)
from isthmus.deploy.processes import jobs_of

SIGNATURES = ".__nvfl_sig.json"
SUBMITTER = ".__nvfl_submitter.crt"
FILES = frozenset({CLIENT_CONFIG, SERVER_CONFIG, SIGNATURES, SUBMITTER})
ROLES = frozenset({"lead"})
"""Roles that may submit. ``super`` passes every check of the library; nobody needs it."""
MAX_FILE_BYTES = 1 << 20


class JobValidator(AppValidator):  # type: ignore[misc]
    """Refuses every job but the one of the template, and a further one at a site that runs as many as it wants."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        reason = refusal_reason(Path(app_folder))
        if reason:
            return f"{REFUSED}: {reason}", {}
        return busy(os.environ.get(AT_ONCE), len(jobs_of(os.getpid()))), {}


def refusal_reason(app: Path) -> str:
    """Why a deployed job is refused; empty if it is the one of the template."""
    try:
        return _check_files(app) or _check_configs(app / "config") or _check_submitter(app)
    except Exception as error:  # whatever fails on a hostile folder is a reason to refuse it
        return f"the job cannot be read ({type(error).__name__})"


def _check_files(app: Path) -> str:
    for path in sorted(app.rglob("*")):
        inside = path.relative_to(app)
        if path.is_symlink():
            return f"link {inside} not permitted"
        if path.is_dir():
            if inside != Path("config"):
                return f"folder {inside} not permitted: sites run only the installed package"
        elif path.name not in FILES:
            return f"file {inside} not permitted: sites run only the installed package"
        elif path.stat().st_size > MAX_FILE_BYTES:
            return f"file {inside} is too large"
    return ""


def _check_configs(config: Path) -> str:
    if json.loads((config / CLIENT_CONFIG).read_text()) != client_config():
        return "the client config differs from the fixed template"
    if parse_server_config(json.loads((config / SERVER_CONFIG).read_text())) is None:
        return "the server config differs from the fixed template"
    return ""


def _check_submitter(app: Path) -> str:
    certificates = sorted(app.rglob(SUBMITTER))
    if not certificates:
        return "the job is not signed by its submitter"
    for path in certificates:
        subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
        roles = [attribute.value for attribute in subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)]
        if len(roles) != 1 or roles[0] not in ROLES:
            return (
                f"jobs of role {', '.join(map(str, roles)) or '(none)'} not permitted, only of "
                f"{', '.join(sorted(ROLES))}"
            )
    return ""

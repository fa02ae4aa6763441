"""The gate: every site looks at a job before anything of it is built, and lets only the one job through.

It runs in the site's parent process, whatever role the submitter has: rights and class lists of the library are passed
over for the role ``super`` and for jobs that carry code; this is not. What it says reaches the submitter
(``job_deploy_detail``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.x509.oid import NameOID
from nvflare.apis.app_validation import AppValidator

from isthmus.deploy.job import CLIENT_CONFIG, SERVER_CONFIG, client_config, props_of

SIGNATURES = ".__nvfl_sig.json"
SUBMITTER = ".__nvfl_submitter.crt"
FILES = frozenset({CLIENT_CONFIG, SERVER_CONFIG, SIGNATURES, SUBMITTER})
ROLES = frozenset({"lead"})
"""Roles whose jobs are looked at. ``super`` passes every check of the library; nobody needs it."""
MOST_BYTES = 1 << 20


class ConfigOnly(AppValidator):  # type: ignore[misc]
    """Refuses every job but ours."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        error = refusal(Path(app_folder))
        return f"isthmus gate: {error}" if error else "", {}


def refusal(app: Path) -> str:
    """Why a deployed app is refused; empty if it is the one we know."""
    try:
        return _files(app) or _configs(app / "config") or _submitter(app)
    except Exception as error:  # whatever a hostile folder makes us stumble over is a reason to refuse it
        return f"the job cannot be read ({type(error).__name__})"


def _files(app: Path) -> str:
    for path in sorted(app.rglob("*")):
        inside = path.relative_to(app)
        if path.is_symlink():
            return f"link {inside} not permitted"
        if path.is_dir():
            if inside != Path("config"):
                return f"folder {inside} not permitted: sites run only the installed package"
        elif path.name not in FILES:
            return f"file {inside} not permitted: sites run only the installed package"
        elif path.stat().st_size > MOST_BYTES:
            return f"file {inside} is too large"
    return ""


def _configs(config: Path) -> str:
    if json.loads((config / CLIENT_CONFIG).read_text()) != client_config():
        return "the client config differs from the fixed template"
    if props_of(json.loads((config / SERVER_CONFIG).read_text())) is None:
        return "the server config differs from the fixed template"
    return ""


def _submitter(app: Path) -> str:
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

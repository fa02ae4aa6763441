"""Who belongs to a federation: ``isthmus server add|approve|revoke|renew``, at the hub, with its folder.

Nothing here touches an organisation that stays: certificates are issued one by one, and a running server reads the
register by itself.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from isthmus.deploy.certificates import (
    Root,
    digest,
    duration,
    key_digest,
    organisation_subject,
    pem,
    read_certificate,
    root_fingerprint,
    same_fingerprint,
)
from isthmus.deploy.federation_folder import OFFERS, FederationFolder
from isthmus.deploy.join_files import Approval, JoinRequest
from isthmus.deploy.members import Members, changing
from isthmus.deploy.provisioning import COORDINATOR_KIT, SERVER_KIT
from isthmus.deploy.startup_kit import certificate_file
from isthmus.errors import ConfigError, unknown


def found(federation: FederationFolder) -> None:
    """Begin the register with certificates of server and coordinator."""
    renew_hub(federation, federation.path / "root")


def renew_hub(federation: FederationFolder, root: Path) -> list[str]:
    """Issue the certificates of server and coordinator again; returns what expires when."""
    authority, lines = Root.read(root, federation.config.name), []
    valid = datetime.timedelta(days=federation.config.days)
    with changing(federation.register) as members:
        for name in (SERVER_KIT, COORDINATOR_KIT):
            kit = federation.kit(name)
            path = kit.startup / certificate_file(kit.kind)
            made = authority.issue_again(read_certificate(path), valid, server=name == SERVER_KIT)
            members = members.issued(made)
            members.write(federation.register)  # before it is used
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(pem(made))
            temporary.rename(path)
            lines.append(f"the certificate of the {name} is valid until {made.not_valid_after_utc:%Y-%m-%d}")
    return lines


def fingerprint_of(federation: FederationFolder) -> str:
    """The fingerprint of the root, which organisations confirm when they join."""
    return root_fingerprint(read_certificate(federation.kit(SERVER_KIT).startup / "rootCA.pem"))


@contextlib.contextmanager
def _changing(federation: FederationFolder) -> Iterator[tuple[FederationFolder, Members]]:
    """The folder as it is now, and its register, while no other command changes either: written over what was read
    before, an approval would bring back who was revoked meanwhile.
    """
    with changing(federation.register) as members:
        yield FederationFolder.read(federation.path), members


def add(federation: FederationFolder, name: str) -> FederationFolder:
    """An organisation may ask for a certificate from now on."""
    with _changing(federation) as (present, _):
        config = present.config
        if name in config.organisations:
            raise ConfigError(f"{name} belongs to the federation already: approve its request")
        return present.with_config(replace(config, organisations=(*config.organisations, name)))


def approve(
    federation: FederationFolder,
    file: Path,
    root: Path,
    fingerprint: str | None,
    valid: str | None = None,
    replaces: bool = False,
) -> tuple[Approval, JoinRequest]:
    """Sign the request of an organisation.

    Args:
        fingerprint: Of the request, as a person there told it. A renewal needs none: it is signed with the long-term
            key of the first request.
        replaces: Revoke the organisation's earlier certificates at once: its key was lost or stolen.
    """
    request = JoinRequest.read(file)
    name, authority = request.organisation, Root.read(root, federation.config.name)
    with _changing(federation) as (present, members):
        config = present.config
        if name not in config.organisations:
            raise unknown("organisation (`isthmus server add` takes one in)", name, config.organisations)
        _check_fingerprint(members, request, fingerprint)
        if members.lost(key_digest(request.public)):
            raise ConfigError(
                f"this request is an old one: the certificate that answered it was revoked. Ask {name} for a new one "
                "(`isthmus client renew`), and who sent this"
            )
        lasts = duration(valid) if valid is not None else datetime.timedelta(days=config.days)
        made = authority.issue(organisation_subject(name), request.public, name, lasts)
        members = members.issued(made).knows(name, request.key)
        if replaces:
            members = members.revoked(name, but=digest(made))
        members.write(federation.register)
    return Approval.make(config.name, name, (config.host, config.port), made, authority), request


def _check_fingerprint(members: Members, request: JoinRequest, given: str | None) -> None:
    if given is not None:
        if not same_fingerprint(given, request.fingerprint):
            raise ConfigError(
                f"the fingerprint of this request is {request.fingerprint}, not {given}: somebody changed it on the "
                f"way, or it is another one; ask {request.organisation} again"
            )
        return
    known = (members.identities or {}).get(request.organisation)
    if known is None:
        raise ConfigError(
            f"ask {request.organisation}, by another way than this file came, for the fingerprint of its request, and "
            "give it with --fingerprint"
        )
    if known != request.key:
        raise ConfigError(
            f"this request is signed with another long-term key than that of {request.organisation}'s last one: ask "
            "for its fingerprint and give it with --fingerprint, if it is really theirs"
        )


def revoke(federation: FederationFolder, name: str) -> FederationFolder:
    """Exclude an organisation: its connections are cut, its certificates are not accepted any more, runs that need it
    end. To come back it must be added again.
    """
    with _changing(federation) as (present, members):
        config = present.config
        if name not in config.organisations:
            raise unknown("organisation", name, config.organisations)
        replace(
            members.revoked(name), identities={k: v for k, v in (members.identities or {}).items() if k != name}
        ).write(federation.register)
        (federation.path / OFFERS / f"{name}.toml").unlink(missing_ok=True)
        return present.with_config(replace(config, organisations=tuple(o for o in config.organisations if o != name)))

"""The format of a site's state folder: what an older version wrote is taken over, what a newer one wrote is refused.

``STATE/format.toml`` says the number and which version of Isthmus wrote it. Checked by ``isthmus client start`` and
by every job.
"""

from __future__ import annotations

from pathlib import Path

import isthmus
from isthmus.errors import ConfigError, StorageError
from isthmus.experiments.config_values import read_toml
from isthmus.experiments.folder import write_atomic

FILE, FORMAT = "format.toml", 1
"""0 is a folder without this file. It holds the same, so taking it over means writing the number."""


def open_state(state: Path) -> None:
    """Make the folder, or take over that of an older version; raises if a newer one wrote it."""
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)  # models and checkpoints are in it
    except OSError as error:
        raise ConfigError(f"cannot make {state}: {error.strerror}; name another state folder in client.toml") from None
    path = state / FILE
    said = read_toml(path) if path.exists() else {"format": 0}
    found, by = said.get("format"), said.get("isthmus", "another version")
    if type(found) is not int or not 0 <= found <= FORMAT:
        raise ConfigError(
            f"{state} has format {found}, written by Isthmus {by}; this version, {isthmus.__version__}, reads up to "
            f"{FORMAT}: install that version again, or restore the backup that was made before it"
        )
    if found < FORMAT:
        try:
            write_atomic(path, f'format = {FORMAT}\nisthmus = "{isthmus.__version__}"\n'.encode())
        except OSError as error:
            raise StorageError(
                f"nothing can be written to {state} ({error.strerror}): make room, or name another state folder in "
                "client.toml"
            ) from None

"""Where the ``isthmus`` command begins: light, so that the version comes at once and Ctrl-C during the seconds of
imports ends quietly.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from isthmus import __version__


def entry() -> int:
    """Run the command line; returns the exit code."""
    if sys.argv[1:] == ["--version"]:
        print(f"isthmus {__version__}")
        return 0
    # An exception would pass through half-imported C extensions, which print or swallow it: while they are loaded,
    # leave at once.
    before = signal.signal(signal.SIGINT, _leave)
    from isthmus.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


def _leave(*signal_and_frame: Any) -> None:
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(entry())

"""Entry point of the ``isthmus`` command: imports little, so that ``--version`` is fast and Ctrl-C during the seconds
of imports prints no traceback.
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
    # C extensions that are being imported would print or swallow an exception, so exit at once meanwhile.
    before = signal.signal(signal.SIGINT, _exit_at_once)
    from isthmus.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


def _exit_at_once(*signal_and_frame: Any) -> None:
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(entry())

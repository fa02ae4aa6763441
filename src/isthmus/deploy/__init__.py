"""Between organisations: NVIDIA FLARE carries the bytes, everything it is trusted with is decided here.

``project`` makes the kits, ``kit`` closes them down and checks them, ``gate`` and ``launch`` keep a site to the
installed package, ``job`` is the only job there is, ``site`` and ``server`` are what runs in it, ``supervisor`` goes on
after a crash, ``loopback`` does all of it on one machine. Private modules of NVIDIA FLARE are used in ``launch`` and
``project``, so its version is pinned.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from isthmus.errors import ConfigError

NVFLARE = "2.9.0"
"""The version whose behaviour was looked at. Another one may have other holes, so it is refused until the tests were
run with it.
"""


def require_nvflare() -> None:
    """Raise unless the pinned engine is installed."""
    try:
        found = version("nvflare")
    except PackageNotFoundError:
        raise ConfigError("the engine nvflare needs an extra: pip install 'isthmus[nvflare]'") from None
    if found != NVFLARE:
        raise ConfigError(
            f"nvflare {found} is installed, Isthmus was made for {NVFLARE}: pip install 'isthmus[nvflare]'"
        )

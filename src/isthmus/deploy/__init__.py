"""Federated runs between organisations, over NVIDIA FLARE. ``docs/deployment.md`` shows which process runs what.

NVIDIA FLARE only transports bytes and starts processes; what it may start, and who may ask for what, is decided here.
Its private modules are used in ``parent_process`` and ``provisioning``, so its version is pinned.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from isthmus.errors import ConfigError

NVFLARE = "2.9.0"
"""The version whose behaviour was checked. Another one may have other vulnerabilities, so it is refused until the tests
were run with it.
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

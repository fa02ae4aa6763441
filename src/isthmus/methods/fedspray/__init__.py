"""FedSpray: `algorithm` (the method), `published` (the same with the paper's messages), `config` (settings)."""

from isthmus.methods.fedspray.algorithm import METHOD, FedSprayClient
from isthmus.methods.fedspray.config import FedSprayConfig
from isthmus.methods.fedspray.published import METHOD as PUBLISHED

__all__ = ["METHOD", "PUBLISHED", "FedSprayClient", "FedSprayConfig"]

"""FedGCN: `algorithm` (the method), `exact` and `published` (the two forms of its exchange), `config` (settings)."""

from isthmus.methods.fedgcn.algorithm import METHOD, FedGCNClient
from isthmus.methods.fedgcn.config import FedGCNConfig

__all__ = ["METHOD", "FedGCNClient", "FedGCNConfig"]

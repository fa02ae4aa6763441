"""FedGCN: `algorithm` (the method), `exact` and `published` (the two forms of its exchange)."""

from isthmus.methods.fedgcn.algorithm import METHOD, FedGCNClient, FedGCNConfig

__all__ = ["METHOD", "FedGCNClient", "FedGCNConfig"]

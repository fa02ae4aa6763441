"""FedGGR: `algorithm` (the paper's, top to bottom), `global_graph` (the server's module), `controls` (to compare with),
`protections` (what makes leaks harder), `diagnostics` (what the learned graph is like), `config`, `messages`.
"""

from isthmus.methods.fedggr.algorithm import METHOD, FedGGRClient, ServerState
from isthmus.methods.fedggr.config import FedGGRConfig

__all__ = ["METHOD", "FedGGRClient", "FedGGRConfig", "ServerState"]

"""FedStruct. `algorithm.py` follows the paper from top to bottom; `streamed.py`, the default, has the same model
without powers, hop by hop. The files beside them are what they are built from.

algorithm.py          the equations, setup, a training round, evaluation, on powers
streamed.py           the same hop by hop; `streamed_hops.py` what travels, `streamed_client.py` an owner,
                      `streamed_cohort.py` the owners of one process
method.py             which of the two a run has
config.py             settings
directory.py          before the powers: who owns which column, which edges clients share
powers.py             powers of the adjacency: products, pruning, the sum; what a protocol must define
powers_published.py   how products travel as the paper prints it
powers_hardened.py    how they travel with less to see
features.py           structure features S
private.py            appendix G.1: nobody receives S of others (method fedstruct-private)
query_guard.py        which of its queries are answered
server_graph.py       appendix H: the server knows the graph (method fedstruct-server); settings in server_config.py
jacobian.py           the Jacobians both appendices may send
client.py, state.py   what a client is made of, what it remembers
"""

from isthmus.methods.fedstruct.algorithm import FedStructClient, Step, Task
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.directory import Directory
from isthmus.methods.fedstruct.method import METHOD
from isthmus.methods.fedstruct.powers import Product
from isthmus.methods.fedstruct.private import METHOD as PRIVATE_METHOD
from isthmus.methods.fedstruct.server_graph import METHOD as SERVER_METHOD
from isthmus.methods.fedstruct.state import block_of

__all__ = [
    "METHOD",
    "PRIVATE_METHOD",
    "SERVER_METHOD",
    "Directory",
    "FedStructClient",
    "FedStructConfig",
    "Product",
    "Step",
    "Task",
    "block_of",
]

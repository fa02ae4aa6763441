"""Methods, one file each, and what an author of one needs.

    from isthmus.methods import Method, Phase, Role, register, ...

See ``examples/fedmedian.py`` for a complete small method and ``isthmus.testing.check_method`` for its test.
"""

from isthmus.federation.interface import Federation, PerClient, Replies, View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import (
    Ciphertext,
    Count,
    Embedding,
    Gradient,
    Identifier,
    LabelStatistic,
    Message,
    Metric,
    Model,
    Share,
    Structure,
)
from isthmus.federation.roles import Client, Cohort, Role, handler
from isthmus.methods.evaluation import Evaluation, Tally, tally
from isthmus.methods.registry import Log, Method, Phase, all_methods, get_method, register
from isthmus.methods.training import Deployed, ModelClient, ModelState, TrainConfig
from isthmus.records import Record

__all__ = [
    "Ciphertext",
    "Client",
    "Cohort",
    "Count",
    "Deployed",
    "Disclosure",
    "Embedding",
    "Evaluation",
    "Federation",
    "Gradient",
    "Identifier",
    "LabelStatistic",
    "Log",
    "Message",
    "Method",
    "Metric",
    "Model",
    "ModelState",
    "ModelClient",
    "PerClient",
    "Phase",
    "Record",
    "Replies",
    "Role",
    "Share",
    "Structure",
    "Tally",
    "TrainConfig",
    "View",
    "all_methods",
    "get_method",
    "handler",
    "register",
    "tally",
]

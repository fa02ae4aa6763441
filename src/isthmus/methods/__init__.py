"""Methods, one file each, and all that an author of one needs, in one import:

    import isthmus.methods as fl

Complete small methods are in ``examples/``: ``fedmedian.py`` and ``gossip.py`` (messages between clients);
``scaffold.py`` of this package is one whose clients remember something. ``isthmus.testing.check_method`` is their test.
"""

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, PerClient, Replies, Stacked, View
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
    PartyId,
    Share,
    Structure,
)
from isthmus.federation.roles import Client, Cohort, Role, handler
from isthmus.federation.script import Script, ask, mail, total
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.evaluation import Evaluation, Tally, scores_of, tally
from isthmus.methods.global_model import (
    GlobalModel,
    evaluate_models,
    first_global_model,
    num_shared_values,
)
from isthmus.methods.registry import Log, Method, Phase, all_methods, get_method, register
from isthmus.methods.training import (
    Deployed,
    ModelClient,
    ModelState,
    Size,
    TrainConfig,
    WeightedClient,
    WeightedConfig,
    total_samples,
)
from isthmus.nn.train import ExtraGradient, Proximal
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values, scaled, weighted_mean

__all__ = [
    "Ciphertext",
    "Client",
    "Cohort",
    "ConfigError",
    "Count",
    "Deployed",
    "Embedding",
    "Evaluation",
    "ExtraGradient",
    "Federation",
    "GlobalModel",
    "Gradient",
    "Identifier",
    "LabelStatistic",
    "Log",
    "Message",
    "Method",
    "Metric",
    "Model",
    "ModelClient",
    "ModelCohort",
    "ModelState",
    "PartyId",
    "PerClient",
    "Phase",
    "Proximal",
    "Record",
    "Replies",
    "Role",
    "Script",
    "Share",
    "Size",
    "Stacked",
    "Stream",
    "Structure",
    "Tally",
    "TrainConfig",
    "View",
    "WeightedClient",
    "WeightedConfig",
    "Weights",
    "all_methods",
    "ask",
    "evaluate_models",
    "first_global_model",
    "get_method",
    "get_weights",
    "handler",
    "mail",
    "num_shared_values",
    "num_values",
    "register",
    "scaled",
    "scores_of",
    "tally",
    "total",
    "total_samples",
    "weighted_mean",
]

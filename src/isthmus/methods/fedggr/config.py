"""Settings of FedGGR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.methods.fedggr.controls import MODULES, SelfSupervised
from isthmus.methods.fedggr.global_graph import GlobalModule
from isthmus.methods.training import WHOLE_MODEL, WeightedConfig
from isthmus.nn.autoencoder import first_autoencoder
from isthmus.nn.backbone import Backbone
from isthmus.nn.registry import build_backbone
from isthmus.nn.two_input_head import first_head
from isthmus.seeds import Stream

AT_LEAST = {
    **dict.fromkeys(("local_width", "global_width", "server_hidden", "encoder_hidden", "embedding_width"), 1),
    **dict.fromkeys(("k", "refresh", "encoder_every"), 1),
    **dict.fromkeys(("encoder_epochs", "self_supervision", "gradient_clip", "gradient_noise"), 0),
}


@dataclass(frozen=True)
class FedGGRConfig(WeightedConfig):
    """Settings of FedGGR; ``hidden`` are the widths of f_theta before Z_loc, ``head`` changes nothing: the classifier
    is always there.

    Args:
        weighting: What a client counts in the mean of W_C; the objective uses ``nodes``. Returned gradients always
            count by nodes.
        local_width: F_l, width of the client's own embedding Z_loc.
        global_width: F_g, width of the rows Z_glob that the server sends.
        joint_dropout: Share of [Z_loc, Z_glob] dropped before the classifier in training.
        activate_local: ReLU on Z_loc before the two channels are joined.
        channel: What Z_glob is made of: the ``learned`` graph, or a control (a fixed ``knn`` graph, ``embeddings``
            only, ``zeros``).
        k: Neighbours each node chooses in the learned graph.
        search: ``exact``, or ``approximate`` for graphs beyond about 100,000 nodes (extra ``ann``).
        refresh: Rounds between two searches; weights of the edges follow the generator in every round.
        server_hidden: Hidden width of the global GNN.
        input_dropout: Share of E dropped before the global GNN in training.
        server_lr: Learning rate of the server; not given = ``lr``.
        self_supervision: Weight of SLAPS' self-supervision, which lets the server train its graph on E as well; 0 =
            off, as in FedGGR.
        hidden_share: Share of the entries of E that self-supervision hides.
        embedding_norm: ``standard`` gives every column of E mean 0 and deviation 1 over all nodes, at the server.
        encoder: Who encodes features: one auto-encoder trained by averaging (``federated``); one per client from a
            common start (``common_start``) or from a start of its own (``independent``); or a public random
            ``projection``, which needs no training.
        encoder_hidden: Hidden width of the auto-encoder.
        embedding_width: p, width of an embedding.
        encoder_epochs: Epochs for which the auto-encoder is trained.
        encoder_lr: Learning rate of the auto-encoder.
        encoder_every: Epochs between two averages of a federated auto-encoder.
        encoder_hops: Whether the auto-encoder sees neighbours.
        returned: Which of the Q gradients of Z is sent back; only ``first`` is exact for the round's starting point.
        scale_gradients: Multiply returned gradients by |V_i| / |V|.
        reset_optimizer: Start the clients' optimiser afresh in every round, as FederatedScope does.
        quorum: Share of the clients that must answer a round.
        dummy_gradients: Nodes without a training label return the gradient of a label drawn from the model's own
            prediction, whose mean is zero, so that the rows of one round do not show who is labelled. No privacy is
            claimed: over many rounds, the rows whose label never changes are the labelled nodes.
        gradient_clip: Length to which the gradient of each node's own loss is clipped; 0 = off.
        gradient_noise: Standard deviation of Gaussian noise added to every returned row, in units of ``gradient_clip``;
            0 = off.
        embedding_bits: Bits per number of E, 1 to 8; 0 = not reduced.
    """

    weighting: Literal["train", "nodes", "uniform"] = "nodes"
    local_width: int = 64
    global_width: int = 64
    joint_dropout: float = 0.0
    activate_local: bool = False
    channel: Literal["learned", "knn", "embeddings", "zeros"] = "learned"
    k: int = 20
    search: Literal["exact", "approximate"] = "exact"
    refresh: int = 10
    server_hidden: int = 64
    input_dropout: float = 0.0
    server_lr: float | None = None
    self_supervision: float = 0.0
    hidden_share: float = 0.2
    embedding_norm: Literal["none", "standard"] = "none"
    encoder: Literal["federated", "common_start", "independent", "projection"] = "federated"
    encoder_hidden: int = 128
    embedding_width: int = 64
    encoder_epochs: int = 200
    encoder_lr: float = 0.01
    encoder_every: int = 1
    encoder_hops: bool = True
    returned: Literal["last", "first", "mean", "sum"] = "last"
    scale_gradients: bool = True
    reset_optimizer: bool = False
    quorum: float = 1.0
    dummy_gradients: bool = False
    gradient_clip: float = 0.0
    gradient_noise: float = 0.0
    embedding_bits: int = 0

    def idle(self) -> dict[str, str]:
        found = super().idle() | {"head": "the classifier is always there", "first_weights": WHOLE_MODEL}
        if not self.self_supervision:
            found["hidden_share"] = "only self_supervision hides entries"
        if self.local_epochs == 1:
            found["returned"] = "one local epoch has one gradient"
        if self.encoder == "projection":
            trained = ("encoder_hidden", "encoder_epochs", "encoder_lr")
            found |= dict.fromkeys(trained, "encoder=projection has no hidden layer and is not trained")
        if self.encoder != "federated":
            found["encoder_every"] = "only encoder=federated takes means"
        return found

    def why_not_masked(self) -> str:
        if self.quorum < 1.0:
            return (
                "quorum below 1 sums over those who answer, and two totals that differ by a client reveal it: set "
                "quorum=1, or run without secure_sum"
            )
        return super().why_not_masked()

    def __post_init__(self) -> None:
        for name, low in AT_LEAST.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        super().__post_init__()
        for name in ("encoder_lr", "server_lr"):
            if (rate := getattr(self, name)) is not None and rate <= 0.0:
                raise ConfigError(f"{name} must be above 0, got {rate}")
        for name in ("joint_dropout", "input_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if not 0.0 < self.hidden_share < 1.0:
            raise ConfigError(f"hidden_share must lie in (0, 1), got {self.hidden_share}")
        if not 0.0 < self.quorum <= 1.0:
            raise ConfigError(f"quorum must lie in (0, 1], got {self.quorum}")
        if not 0 <= self.embedding_bits <= 8:
            raise ConfigError(f"embedding_bits must lie in 0 to 8, got {self.embedding_bits}")
        if self.self_supervision and self.channel != "learned":
            raise ConfigError(f"self_supervision trains a learned graph: leave it out with channel={self.channel}")
        if self.encoder == "federated" and self.encoder_epochs % self.encoder_every:
            raise ConfigError(
                f"encoder_epochs must be a multiple of encoder_every, got {self.encoder_epochs} and "
                f"{self.encoder_every}"
            )
        if self.init != "standard":
            raise ConfigError(f"fedggr starts f_theta as its layers do: leave init out, got {self.init}")
        if self.dummy_gradients and (self.loss != "ce" or self.class_weight != "none"):
            raise ConfigError(
                "dummy_gradients look like those of plain cross-entropy: use loss=ce and leave class_weight out"
            )
        if self.gradient_noise and not self.gradient_clip:
            raise ConfigError(
                "gradient_noise counts in units of gradient_clip: set gradient_clip above 0 too, e.g. gradient_clip=0.1"
            )

    def build(self, *, num_features: int, num_classes: int, stream: Stream) -> Backbone:
        """f_theta: the backbone up to Z_loc, whatever the number of classes."""
        model = build_backbone(
            self.backbone,
            num_features=num_features,
            num_classes=self.local_width,
            hidden=self.hidden,
            dropout=self.dropout,
            input_norm=self.input_norm,
            stream=stream,
            **self.options,
        )
        return model.to(self.dtype)

    def first_head(self, num_classes: int, common: Stream) -> dict[str, Tensor]:
        return first_head(self.local_width, self.global_width, num_classes, common.child("head"), self.dtype)

    def first_autoencoder(self, num_features: int, stream: Stream) -> dict[str, Tensor]:
        return first_autoencoder(
            num_features, self.encoder_hidden, self.embedding_width, stream.child("encoder"), self.dtype
        )

    @property
    def encoder_rounds(self) -> int:
        """Means of a federated auto-encoder, each a round of the setup."""
        return self.encoder_epochs // self.encoder_every if self.encoder == "federated" else 0

    @property
    def module(self) -> GlobalModule:
        """The shape of the server's module."""
        common = self.k, self.search, self.dropout, self.input_dropout
        if self.self_supervision:
            return SelfSupervised(*common, self.self_supervision, self.hidden_share)
        return MODULES[self.channel](*common)

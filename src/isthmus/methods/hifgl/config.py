"""Settings of HiFGL, and what follows from them alone: how each layer is computed, how numbers are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError, unknown
from isthmus.methods.schedule import Schedule, check_schedule
from isthmus.nn.backbone import Backbone
from isthmus.nn.registry import build_backbone
from isthmus.privacy.dp import Mechanism
from isthmus.privacy.field import P31, P61, Elements, Field
from isthmus.privacy.fixedpoint import FixedPoint, most_terms
from isthmus.privacy.secmp import SecretSums
from isthmus.seeds import Stream

Form = Literal["cached", "project", "aggregate"]
KINDS = {"gcn": "gcn", "sage": "sage", "graphsage": "sage"}
THRESHOLD = 2
"""T unless given: the server alone cannot help an organisation to open what it receives."""
_POSITIVE = ("lr", "bound", "message_clip")
_COUNTS = ("local_epochs", "k_min", "horizon", "max_degree", "columns", "min_cohort")


@dataclass(frozen=True)
class LayerPlan:
    """How each layer is computed, and how wide its messages are. Layers count from 1.

    Args:
        sizes: Input and output width of each layer.
        forms: ``aggregate``: sum over neighbours, then multiply by W. ``project``: multiply by W first, so that the
            narrower values travel, forward and backward (exact as well: A (h W) = (A h) W). ``cached``: the sums of the
            first layer's raw features never change, so they travel once, in setup.
        columns: Features per message while raw features are sent.
    """

    sizes: tuple[tuple[int, int], ...]
    forms: tuple[Form, ...]
    columns: int

    @property
    def raw(self) -> list[int]:
        """Widths of the exchanges of setup, in which raw features travel."""
        features = self.sizes[0][0]
        starts = range(0, features if self.forms[0] == "cached" else 0, self.columns)
        return [min(self.columns, features - start) for start in starts]

    @property
    def forward(self) -> dict[int, int]:
        """Width of the exchange of each layer that has one in every round, in the order of the exchanges."""
        return {
            layer: outer if form == "project" else inner
            for layer, ((inner, outer), form) in enumerate(zip(self.sizes, self.forms, strict=True), 1)
            if form != "cached"
        }

    @property
    def backward(self) -> dict[int, int]:
        """The same backward: gradients return over the same edges."""
        return dict(reversed(self.forward.items()))

    @property
    def widths(self) -> list[int]:
        """Of all exchanges of a training round."""
        return [*self.forward.values(), *self.backward.values()]


@dataclass(frozen=True)
class HiFGLConfig:
    """Settings of HiFGL.

    Args:
        backbone: ``gcn`` or ``sage``, split so that neither end of an edge learns the other's degree (spec 3.1).
        hidden: Widths of the hidden layers.
        dropout: Share of hidden values dropped in training.
        lr: Learning rate of a step.
        weight_decay: This many times the weights is added to each gradient; with ``adamw`` it is decoupled.
        optimizer: Optimiser: ``adam``, ``adamw`` or ``sgd``.
        schedule: How the learning rate changes over rounds: ``constant``, ``decay`` (times ``lr_decay`` every
            ``lr_step`` rounds) or ``cosine`` (to nearly 0 over ``schedule_rounds``).
        lr_decay: Factor of ``schedule=decay``.
        lr_step: Rounds between two reductions of ``schedule=decay``.
        schedule_rounds: Rounds over which ``schedule=cosine`` runs; not given = the run's rounds.
        precision: Floating-point type of weights and features.
        class_weight: ``balanced`` makes every class count the same in a silo's loss; its devices then learn how the
            silo's classes are weighted.
        local_epochs: Steps of a silo per round. All of them use the messages of the round's start (spec 11.4).
        algorithm: How silos train together: ``fedavg``, ``fedprox``, ``fedper``, or ``fedsgd`` (one optimiser, at the
            server, as in the reference code).
        mu: Weight of FedProx's term. With one local step it has no effect.
        personal_layers: With ``algorithm=fedper``, how many layers, counted from the output, stay with their silo.
        weighting: How much a silo counts: all the same (``uniform``, the paper) or by its labelled devices (``train``).
        mode: Who takes part: ``hierarchical``: devices, silos and a server; ``cross-silo``: no devices, only edges
            between silos are protected; ``cross-device``: no silos.
        secmp: Protocol of secret message passing: ``hardened``, ``published`` (leaks, see spec 11.2), ``plain`` (no
            protection).
        threshold: T: how many share holders there are besides the target, none of them of its organisation; not given =
            2, or as many as there are.
        one_neighbour: What happens at devices with fewer than ``k_min`` neighbours, which would learn single values
            from sums: sources send them nothing (``drop``), all sources add noise (``dp``), or it is accepted
            (``allow``).
        k_min: Devices with fewer foreign neighbours than this are treated as ``one_neighbour`` says.
        message_clip: With ``one_neighbour=dp``, L2 norm to which a message is clipped.
        message_noise: With ``one_neighbour=dp``, standard deviation of the noise in units of ``message_clip``.
        dp_delta: With ``one_neighbour=dp``, the delta for which the result states epsilon.
        first_layer: What the first layer sends: raw features once (``raw``), or projected ones in every round
            (``project``); ``auto`` takes what sends less over ``horizon`` rounds.
        horizon: Rounds over which ``first_layer=auto`` compares the bytes of raw and of projected features.
        prime: Prime of the field in which shares are computed.
        fraction_bits: Bits after the point of a number in the field.
        bound: Largest absolute value that can be sent.
        max_degree: Largest number of values in a sum; not given = as many as the field holds (67,108,863 with the
            defaults).
        columns: Features per message while raw features are sent.
        min_cohort: Fewest devices of a silo whose gradients may be summed (a silo that is a single device is that
            device).
    """

    backbone: str = "gcn"
    hidden: tuple[int, ...] = (64,)
    dropout: float = 0.0
    lr: float = 0.01
    schedule: Schedule = "decay"
    lr_decay: float = 0.9
    lr_step: int = 4
    schedule_rounds: int | None = None
    weight_decay: float = 0.0
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    class_weight: Literal["none", "balanced"] = "none"
    local_epochs: int = 1
    precision: Literal["float32", "float64"] = "float32"
    algorithm: Literal["fedavg", "fedprox", "fedper", "fedsgd"] = "fedavg"
    mu: float = 0.01
    personal_layers: int = 1
    weighting: Literal["uniform", "train"] = "uniform"
    mode: Literal["hierarchical", "cross-silo", "cross-device"] = "hierarchical"
    secmp: Literal["hardened", "published", "plain"] = "hardened"
    threshold: int | None = None
    one_neighbour: Literal["drop", "dp", "allow"] = "drop"
    k_min: int = 3
    message_clip: float = 1.0
    message_noise: float = 1.0
    dp_delta: float = 1e-5
    first_layer: Literal["auto", "raw", "project"] = "auto"
    horizon: int = 50
    prime: int = P61
    fraction_bits: int = 24
    bound: float = 1024.0
    max_degree: int | None = None
    columns: int = 128
    min_cohort: int = 2

    def __post_init__(self) -> None:
        if self.backbone not in KINDS:
            raise unknown("backbone of hifgl", self.backbone, KINDS)
        for name in (*_POSITIVE, *_COUNTS):
            value, least = getattr(self, name), "at least 1" if name in _COUNTS else "above 0"
            if value is not None and not (value >= 1 if name in _COUNTS else value > 0.0):
                raise ConfigError(f"{name} must be {least}, got {value}")
        check_schedule(self)
        for name in ("weight_decay", "mu", "message_noise", "personal_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0.0 < self.dp_delta < 1.0:
            raise ConfigError(f"dp_delta must lie in (0, 1), got {self.dp_delta}")
        if self.threshold is not None and self.threshold < 1:
            raise ConfigError(f"threshold must be at least 1, got {self.threshold}")
        if self.mode == "cross-device" and (self.threshold or 1) > 1:
            raise ConfigError(
                f"cross-device has two share holders, device and server: set threshold=1, got {self.threshold}"
            )
        if self.mode != "hierarchical" and self.secmp == "published":
            raise ConfigError(
                "secmp=published needs devices, silos and server: set mode=hierarchical or secmp=hardened"
            )
        if self.mode == "cross-device" and self.algorithm != "fedsgd":
            object.__setattr__(self, "algorithm", "fedsgd")  # there is no silo that could step
        self.build(1, 2, Stream(0))
        self.sums(self.threshold or THRESHOLD)  # refuses a field that is too small

    def idle(self) -> dict[str, str]:
        """Settings that change nothing beside the others, and why."""
        found: dict[str, str] = {}
        if self.one_neighbour != "dp":
            of_noise = ("message_clip", "message_noise", "dp_delta")
            found |= dict.fromkeys(of_noise, "only one_neighbour=dp adds noise to messages")
        if self.first_layer != "auto":
            found["horizon"] = "only first_layer=auto asks for it"
        if self.secmp == "plain":
            of_field = ("threshold", "prime", "fraction_bits", "bound", "max_degree")
            found |= dict.fromkeys(of_field, "secmp=plain shares no secrets")
        return found

    @property
    def kind(self) -> str:
        return KINDS[self.backbone]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    @cached_property
    def format(self) -> FixedPoint:
        field = Field(self.prime)
        terms = self.max_degree or most_terms(field, self.fraction_bits, self.bound)
        return FixedPoint(field, self.fraction_bits, self.bound, terms)

    def sums(self, threshold: int) -> SecretSums:
        """The arithmetic of T + 1 shares."""
        return SecretSums(self.format, threshold)

    def holders(self, silos: int) -> int:
        """T among so many silos: every message to a device has the server and other silos as holders."""
        most = 1 if self.mode == "cross-device" else silos
        return min(THRESHOLD, most) if self.threshold is None else self.threshold

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism(self.message_clip, self.message_noise)

    def build(self, num_features: int, num_classes: int, stream: Stream) -> Backbone:
        """The first model: the one every method of the same seed starts from."""
        model = build_backbone(
            self.kind,
            num_features=num_features,
            num_classes=num_classes,
            hidden=self.hidden,
            dropout=self.dropout,
            input_norm=False,
            head=False,
            stream=stream,
        )
        return model.to(self.dtype)

    # -- layers ------------------------------------------------------------------------------------

    @property
    def personal(self) -> range:
        """Layers that stay with their silo (FedPer)."""
        layers = len(self.hidden) + 1
        return range(max(0, layers - self.personal_layers) + 1, layers + 1) if self.algorithm == "fedper" else range(0)

    def plan(self, num_features: int, num_classes: int) -> LayerPlan:
        """A personal layer cannot be applied at the source, whose silo has another one."""
        sizes = tuple(pairwise([num_features, *self.hidden, num_classes]))
        forms: list[Form] = []
        for layer, (inner, outer) in enumerate(sizes, 1):
            if layer == 1:
                forms.append("cached" if self._raw_once(inner, outer) or layer in self.personal else "project")
            else:
                forms.append("project" if outer <= inner and layer not in self.personal else "aggregate")
        return LayerPlan(sizes, tuple(forms), self.columns)

    def _raw_once(self, features: int, width: int) -> bool:
        """The cost model: raw features once, or three projected exchanges (forward, backward, evaluation) per round."""
        return self.first_layer == "raw" or (self.first_layer == "auto" and features <= 3 * width * self.horizon)

    # -- wire --------------------------------------------------------------------------------------

    def to_wire(self, values: Elements) -> Tensor:
        """Field elements as they travel: 4 bytes each where the prime has 31 bits, else 8."""
        kind: Any = np.int32 if self.prime <= P31 else np.int64
        return torch.from_numpy(values.astype(kind))

    def from_wire(self, values: Tensor) -> Elements:
        """Back; a negative number becomes one that no field has."""
        return values.numpy().astype(np.int64).view(np.uint64)

    @property
    def element_bytes(self) -> int:
        return 4 if self.prime <= P31 else 8

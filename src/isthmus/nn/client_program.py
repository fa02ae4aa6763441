"""What `isthmus.nn.client_kernel` reads: inputs and layers of K clients laid out as flat arrays, once per run.

First weights (one matrix per term of the first layer) are rows of one array. Rows of features that a client's training
nodes never see are *idle*: their gradient is zero. With ``compact`` the array holds the other, *active* rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import DataError
from isthmus.nn.backbone import Backbone
from isthmus.nn.client_kernel import Aim, Dropout, Layout, Matrices, Origin, Plan, Sum, train_clients
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import Array, split, threads_for
from isthmus.nn.layers import Conv
from isthmus.nn.manual_gradients import has_manual_gradient

MOST_TERMS = 2
LOOPS_BELOW = 0.5
"""Share of non-zeros above which a dense product is faster, whatever calling it costs."""
_WORDS = 4  # values per 64 random bits


@dataclass(frozen=True, eq=False)
class Program:
    """The local training of K clients.

    Args:
        first: Names of the first weight matrices.
        flat: Place and shape of every other weight in a client's flat array.
        width: Length of that array.
        classes: Outputs of the model.
        active: For each term the (client, feature, row) of its active rows, as three arrays.
        levels: Level and width of every dropout mask.
    """

    first: tuple[str, ...]
    flat: Mapping[str, tuple[int, tuple[int, ...]]]
    width: int
    features: int
    classes: int
    dropout: float
    matrices: Matrices
    layout: Layout
    active: tuple[tuple[Array, Array, Array], ...]
    levels: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    @property
    def clients(self) -> int:
        return len(self.layout.rows)

    @cached_property
    def idle(self) -> tuple[Array, ...]:
        """For each term the features that some client never sees."""
        counts = (np.bincount(feature, minlength=self.features) for _, feature, _ in self.active)
        return tuple(np.flatnonzero(count < self.clients) for count in counts)

    @cached_property
    def idle_masks(self) -> tuple[Array, ...]:
        """`idle` as masks over features."""
        masks = tuple(np.zeros(self.features, dtype=np.bool_) for _ in self.idle)
        for mask, features in zip(masks, self.idle, strict=True):
            mask[features] = True
        return masks

    @cached_property
    def no_targets(self) -> tuple[Array, Array]:
        """Targets of `Aim`, and their sums, where there are none."""
        kind = self.layout.weight.dtype
        return np.zeros((0, self.classes), dtype=kind), np.zeros(0, dtype=kind)

    def flatten(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Write what is given of the other weights into the flat arrays (K, width), the same into each."""
        flat = out.numpy()
        for name, tensor in tensors.items():
            if name in self.flat:
                place, shape = self.flat[name]
                # In numpy: torch takes several times as long to find a part of a tensor.
                flat[:, place : place + math.prod(shape)] = tensor.detach().numpy().reshape(-1)

    def trained(self, names: Collection[str]) -> Array:
        """Where the flat weights of these names lie, neighbours joined."""
        parts: list[list[int]] = []
        for name, (place, shape) in self.flat.items():
            if name not in names:
                continue
            end = place + math.prod(shape)
            if parts and parts[-1][1] == place:
                parts[-1][1] = end
            else:
                parts.append([place, end])
        return np.array(parts, dtype=np.int64).reshape(-1, 2)

    def draw(self, source: DropoutSource | None, epochs: int, clients: Array | None = None) -> Dropout:
        """All random bits of the call, in the order in which every client would draw them epoch by epoch."""
        kind = self.layout.weight.dtype.type
        if source is None or not self.dropout or not self.levels:
            return Dropout(np.zeros(1, np.int16), np.zeros(self.clients, np.int64), 0, kind(1), False)
        words = np.zeros(self.clients, dtype=np.int64)
        for level, width in self.levels:
            words += epochs * self.layout.rows[:, level] * -(-width // _WORDS)
        if clients is not None:
            bits, places = source.draw(words[clients])
            start = np.zeros(self.clients, dtype=np.int64)
            start[clients] = places
        else:
            bits, start = source.draw(words)
        threshold, scale = source.threshold(self.dropout), source.scale(self.dropout)
        return Dropout(bits, start, threshold, kind(scale), True)

    def _cost(self, rows: Tensor, plan: Plan) -> int:
        return len(plan.table) * (rows.numel() + len(self.matrices.values))

    def adds_up(self, rows: Tensor, plan: Plan) -> bool:
        """Whether `run` can add up weights: in one thread, so that the sum has one order."""
        return threads_for(self._cost(rows, plan)) == 1

    def run(
        self,
        rows: Sequence[Tensor],
        flat: Sequence[Tensor],
        plan: Plan,
        drop: Dropout,
        trained: Array,
        aim: Aim,
        clients: Array | None = None,
        origin: Origin | None = None,
        added: Sum | None = None,
    ) -> Tensor:
        """Train clients, all by default; the loss of each at the last step, before it (K,).

        Args:
            rows: First weights by row, and their moments unless the optimiser is SGD.
            flat: All others (K, width), and theirs.
            trained: From `trained`.
            origin, added: As in `train_clients`; ``added`` where `adds_up` says so.
        """
        loss, layout = np.zeros(self.clients, dtype=plan.common.dtype), self.layout._replace(trained=trained)
        arrays = [*padded(rows), *padded(flat)]
        nothing = np.zeros((0, 0), loss.dtype)
        origin = Origin(nothing, nothing) if origin is None else origin
        added = Sum(nothing.reshape(-1), nothing, nothing) if added is None else added
        chosen = np.arange(self.clients) if clients is None else clients

        def work(begin: int, end: int) -> None:
            train_clients(chosen[begin:end], self.matrices, layout, drop, plan, aim, loss, origin, added, *arrays)

        split(work, len(chosen), self._cost(rows[0], plan))
        return torch.from_numpy(loss)


def padded(tensors: Sequence[Tensor]) -> list[Array | None]:
    """Weights and both moments as arrays; None for moments that are not there."""
    return [tensor.numpy() for tensor in tensors] + [None] * (3 - len(tensors))


def in_one_loop(model: Backbone, clients: Sequence[Inputs]) -> bool:
    """Whether `build_program` makes a program of these."""
    return _layers(model) is not None and not _dense(clients, int(model.convs[0].get_parameter(_first(model)).shape[0]))


def _first(model: Backbone) -> str:
    return next(iter(model.convs[0].weight_terms))


def build_program(model: Backbone, clients: Sequence[Inputs], *, compact: bool = False) -> Program | None:
    """The program of these clients' inputs (one client each), None where the compiled loop does not know the model."""
    layers = _layers(model)
    if layers is None:
        return None
    places, table, width = layers
    names = tuple(model.first_terms)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    features, first_width = shapes[names[0]]
    if _dense(clients, features):
        return None
    packed = _Packed(len(clients), 4 * len(names) + 2 * (len(clients[0].rows) - 1))
    rows = np.array([[count for (count,) in inputs.rows] for inputs in clients], dtype=np.int64)
    inner = np.zeros((len(clients), len(names)), dtype=np.int64)
    starts = np.zeros((len(clients), len(names), 2), dtype=np.int64)
    uv_start = np.zeros((len(clients), len(names)), dtype=np.int64)
    active, places_of, vectors = list[Array](), list[Array](), list[tuple[Array, Array]]()
    found: list[tuple[list[Array], list[Array], list[Array]]] = [([], [], []) for _ in names]
    norm, used, seen, vector_at = bool(model.norm_names), 0, 0, 0
    for k, inputs in enumerate(clients):
        for t, name in enumerate(names):
            operand = inputs.first[name]
            matrix, after = _csr(operand.matrix), operand.after
            transposed = matrix.T.tocsr()
            own = np.arange(features) if norm else np.flatnonzero(np.diff(transposed.indptr))
            base = used if compact else (k * len(names) + t) * features
            row_of = np.zeros(features, dtype=np.int64)
            row_of[own] = base + (np.arange(len(own)) if compact else own)
            used += len(own)
            inner[k, t] = rows[k, 0] if after is None else matrix.shape[0]
            packed.add(k, 4 * t, matrix, row_of[matrix.indices])
            packed.add(k, 4 * t + 1, transposed[own], None)
            if after is not None:
                packed.add(k, 4 * t + 2, after.csr, None)
                packed.add(k, 4 * t + 3, after.transposed, None)
            starts[k, t] = seen, seen + len(own)
            seen += len(own)
            active.append(row_of[own])
            places_of.append(own if compact else np.arange(features))
            for part, value in zip(found[t], (np.full(len(own), k), own, row_of[own]), strict=True):
                part.append(value)
            uv_start[k, t] = vector_at
            if operand.u is not None and operand.v is not None:
                vectors.append((operand.u.numpy(), operand.v.numpy()))
                vector_at += len(operand.u)
        for level, hop in enumerate(inputs.hidden):
            packed.add(k, 4 * len(names) + 2 * level, hop.csr, None)
            packed.add(k, 4 * len(names) + 2 * level + 1, hop.transposed, None)
    kind = clients[0].weight.numpy().dtype
    none = np.zeros(0, dtype=kind)
    out_start = np.concatenate([[0], np.cumsum(rows[:, -1])])
    layout = Layout(
        len(names),
        first_width,
        table,
        rows,
        inner,
        np.concatenate(active),
        starts,
        np.concatenate(places_of),
        norm,
        places[model.norm_names[0]][0] if norm else 0,
        features,
        np.concatenate([u for u, _ in vectors]) if vectors else none,
        np.concatenate([v for _, v in vectors]) if vectors else none,
        uv_start,
        out_start,
        np.concatenate([inputs.y[: inputs.counts[0]].numpy() for inputs in clients]),
        np.concatenate([inputs.weight[: inputs.counts[0]].numpy() for inputs in clients]),
        np.zeros((0, 2), dtype=np.int64),
    )
    classes = int(table[-1, 2]) if len(table) else first_width
    if len(layout.y) and int(layout.y.max()) >= classes:  # the compiled loop checks no bounds
        raise DataError(
            f"labels go up to {int(layout.y.max())}, the model has {classes} classes; set num_classes accordingly"
        )
    return Program(
        names,
        places,
        width,
        features,
        classes,
        model.dropout,
        packed.matrices(kind),
        layout,
        tuple((np.concatenate(a), np.concatenate(b), np.concatenate(c)) for a, b, c in found),
        tuple((int(layer[4]), int(layer[1])) for layer in table if layer[3]),
        clients[0].weight.dtype,
    )


_PROGRAMS: WeakKeyDictionary[Inputs, tuple[Backbone, Program | None]] = WeakKeyDictionary()


def program_of(model: Backbone, inputs: Inputs) -> Program | None:
    """The program of one client's inputs, built on first use."""
    if inputs.clients != 1:
        return None
    known = _PROGRAMS.get(inputs)
    if known is None or known[0] is not model:
        known = _PROGRAMS[inputs] = (model, build_program(model, [inputs]))
    return known[1]


def _dense(clients: Sequence[Inputs], features: int) -> bool:
    """Whether features are too dense for loops over what is not zero, or not those of the model (which is refused where
    it is looked at closely).
    """
    matrices = [operand.matrix for inputs in clients for operand in inputs.first.values()]
    entries = sum(int(torch.count_nonzero(m)) if isinstance(m, Tensor) else m.nnz for m in matrices)
    places = sum(int(m.shape[0]) * int(m.shape[1]) for m in matrices)
    return entries > LOOPS_BELOW * places or any(int(m.shape[1]) != features for m in matrices)


def _csr(matrix: Tensor | sp.csr_matrix) -> sp.csr_matrix:
    return sp.csr_matrix(matrix.numpy()) if isinstance(matrix, Tensor) else matrix


def _layers(model: Backbone) -> tuple[dict[str, tuple[int, tuple[int, ...]]], Array, int] | None:
    """Places of the flat weights, a row of `Layout.layers` for each layer after the first, length of the flat array."""
    if not has_manual_gradient(model) or len(model.first_terms) > MOST_TERMS:
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    order = ["layers.0.bias"]
    for placed in model.layers_after_input:
        order += [placed.prefix + name for name in (*placed.conv.weight_terms, "bias")]
    order += model.norm_names
    if {*order, *model.first_terms} != set(shapes):
        return None
    places, at = dict[str, tuple[int, tuple[int, ...]]](), 0
    for name in order:
        places[name] = (at, shapes[name])
        at += math.prod(shapes[name])
    table = np.zeros((len(model.layers_after_input), 11), dtype=np.int64)
    for row, placed in zip(table, model.layers_after_input, strict=True):
        terms = _terms(placed.conv)
        if terms is None:
            return None
        weight = placed.prefix + next(iter(placed.conv.weight_terms))
        row[:6] = len(terms), *shapes[weight], placed.activated, placed.before, placed.level
        for term, (name, propagated) in enumerate(terms):
            row[6 + 2 * term : 8 + 2 * term] = propagated, places[placed.prefix + name][0]
        row[10] = places[f"{placed.prefix}bias"][0]
    return places, table, at


def _terms(conv: Conv) -> list[tuple[str, bool]] | None:
    terms = list(conv.weight_terms.items())
    return terms if len(terms) <= MOST_TERMS else None


class _Packed:
    """CSR matrices collected into `Matrices`."""

    def __init__(self, clients: int, slots: int) -> None:
        self.ids = np.full((clients, slots), -1, dtype=np.int64)
        self.parts: list[tuple[Array, Array, Array]] = []

    def add(self, client: int, slot: int, matrix: sp.csr_matrix, indices: Array | None) -> None:
        self.ids[client, slot] = len(self.parts)
        self.parts.append((matrix.indptr, matrix.indices if indices is None else indices, matrix.data))

    def matrices(self, kind: np.dtype[np.floating]) -> Matrices:
        counts = np.array([len(indices) for _, indices, _ in self.parts], dtype=np.int64)
        lengths = np.array([len(indptr) for indptr, _, _ in self.parts], dtype=np.int64)
        offset, start = np.cumsum(counts) - counts, np.cumsum(lengths) - lengths
        indptr = np.concatenate(
            [part.astype(np.int64) + at for (part, _, _), at in zip(self.parts, offset, strict=True)]
        )
        indices = np.concatenate([part for _, part, _ in self.parts]).astype(np.int32)
        values = np.concatenate([part for _, _, part in self.parts]).astype(kind)
        return Matrices(indptr, indices, values, start, self.ids)

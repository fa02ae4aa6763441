"""Owners of one process in the streamed protocol: a hop of all is one product with the whole adjacency.

What would travel is counted as if it did; sums are formed in another order, so results agree up to rounding. Rows are
those of the clients one below the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.federation.interface import Exchanged, Stacked
from isthmus.federation.roles import Cohort
from isthmus.federation.schema import OnlyTotal, ScaledRows
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.fedstruct.client import BETAS, own_loss, stack_evaluations
from isthmus.methods.fedstruct.streamed_hops import Backward, Forward, Hop, Hops, Start, ThetaStep, betas_of
from isthmus.nn.inputs import stack_inputs
from isthmus.nn.kernels import spmm
from isthmus.nn.sparse import Sparse, canonical
from isthmus.tensors import Weights

if TYPE_CHECKING:
    from isthmus.methods.fedstruct.streamed_client import StreamedClient

KEPT_TOGETHER = 2**26
"""Hidden values of g of all owners together that are kept from the forward to the backward pass."""


class StreamedCohort(Cohort[Any]):
    """`StreamedClient`'s handlers, of many clients together. Clients keep their own state."""

    masked = False
    clients: Sequence[StreamedClient]

    def __init__(self, clients: Sequence[StreamedClient]) -> None:
        super().__init__(clients)
        self.config = clients[0].config
        self.parties = tuple(client.party for client in clients)
        self.inputs = stack_inputs([client.inputs for client in clients])
        self.sizes = [client.data.num_nodes for client in clients]
        self.offsets = np.cumsum([0, *self.sizes])
        starts = zip(clients, self.offsets, strict=False)
        self.train_rows = torch.cat([client.train_rows + int(start) for client, start in starts])
        self._adjacency: tuple[list[Tensor], Sparse] | None = None
        self.weights: Weights = {}
        self.theta_f: dict[str, Tensor] = {}
        self.total = 0.0
        self.hops: Hops

    @classmethod
    def worthwhile(cls, clients: Sequence[StreamedClient]) -> bool:
        return clients[0].config.algorithm == "fedsgd" and ModelCohort.worthwhile(clients)

    @property
    def adjacency(self) -> Sparse:
        """Ah of all nodes, from what every owner has of it; made again when that is another."""
        arcs = [client.state.forward for client in self.clients]
        if self._adjacency is None or any(a is not b for a, b in zip(self._adjacency[0], arcs, strict=True)):
            self._adjacency = arcs, Sparse(canonical(self._joined(), self.config.dtype))
        return self._adjacency[1]

    def _joined(self) -> sp.csr_matrix:
        rows, columns, values = list[NDArray[Any]](), list[NDArray[Any]](), list[NDArray[Any]]()
        starts = dict(zip(self.parties, self.offsets, strict=False))
        boundary = {client.party: client.boundary for client in self.clients}
        for client in self.clients:
            inner, begin = client.inner.tocoo(), starts[client.party]
            rows.append(inner.row + begin)
            columns.append(inner.col + begin)
            values.append(inner.data)
            slots = [boundary[other][:count] + starts[other] for other, count in client.state.out_slots.items()]
            arcs = client.arcs("forward").tocoo()
            rows.append(np.concatenate(slots)[arcs.row] if slots else arcs.row)
            columns.append(arcs.col + begin)
            values.append(arcs.data)
        nodes = int(self.offsets[-1])
        place = np.concatenate(rows), np.concatenate(columns)
        whole = sp.csr_matrix((np.concatenate(values).astype(np.float64), place), shape=(nodes, nodes))
        whole.sum_duplicates()
        degree = np.concatenate([client.degree for client in self.clients])
        whole.data /= np.repeat(degree, np.diff(whole.indptr))
        return whole

    def split(self, rows: Tensor) -> list[Tensor]:
        return list(torch.split(rows, self.sizes))

    # -- handlers ----------------------------------------------------------------------------------

    def begin(self, start: Start) -> None:
        self.weights, self.total = start.weights, start.total
        keep = sum(client.rows_of_s().numel() for client in self.clients) <= KEPT_TOGETHER
        parts = [client.first_values(start.weights, training=start.training, keep=keep) for client in self.clients]
        for client in self.clients:
            client.scratch.weights, client.scratch.total = start.weights, start.total
        rows = self.train_rows if start.training else None
        keep = start.training and self.config.train_betas
        self.hops = Hops(torch.cat(parts), betas_of(self.config, start.weights), rows, keep=keep)

    def send_forward(self, hop: Hop) -> Exchanged[Forward]:
        self.hops.next(spmm(self.adjacency.csr, self.hops.values), hop.hop)
        classes, like = self.hops.values.shape[1], self.hops.values
        return Exchanged({c.party: Forward(like.new_empty(len(c.boundary), classes)) for c in self.clients})

    def differentiate(self) -> None:
        streams = [client.stream for client in self.clients]
        counts = [len(client.train_rows) for client in self.clients]
        z = torch.split(self.hops.z, counts)
        self.theta_f, residual = own_loss(self.clients[0], self.inputs, self.weights, z, streams)
        pairs = zip(self.clients, self.inputs.split(residual), strict=True)
        self.hops.turn(torch.cat([part * client.samples() for client, part in pairs]))

    def send_backward(self, hop: Hop) -> Exchanged[Backward]:
        self.hops.back(spmm(self.adjacency.transposed, self.hops.grad), hop.hop)
        classes, like = self.hops.grad.shape[1], self.hops.grad
        return Exchanged({c.party: Backward(like.new_empty(len(c.entered), classes)) for c in self.clients})

    def finish(self) -> Stacked[ThetaStep]:
        found: dict[str, Tensor] = {}
        shares: list[float] = []
        for client, grad in zip(self.clients, self.split(self.hops.grad), strict=True):
            grads, own = client.finished(grad)
            shares.append(own)
            for name, tensor in grads.items():
                found[name] = found[name].add_(tensor) if name in found else tensor
        if self.config.train_betas:
            found[BETAS] = self.hops.beta_gradients() / self.total
        share: Any = torch.tensor(shares, dtype=torch.float64)
        theta: Any = {name: ScaledRows(tensor, share) for name, tensor in self.theta_f.items()}
        theta |= {name: OnlyTotal(tensor, len(self.clients)) for name, tensor in found.items()}
        return Stacked(ThetaStep({name: theta[name] for name in self.weights}, share), self.parties)

    def score(self) -> Stacked[Evaluation]:
        for client, z in zip(self.clients, self.split(self.hops.z), strict=True):
            client.keep_scores(self.weights, z)
        return Stacked(stack_evaluations([client.evaluate() for client in self.clients]), self.parties)

"""Weights and optimiser states of K clients that are trained by one compiled loop.

Most rows of a wide first layer belong to features that a client's training nodes never see. Such *idle* rows have no
gradient, so all clients that took the same steps from the same weights have the same numbers there: these clients are a
*group*, and the group keeps its idle rows once. A group splits when some of its clients take part in a round and others
do not. Clients' own, *active* rows are kept side by side. Everything is what the clients would compute one by one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from isthmus.nn.buffers import empty
from isthmus.nn.client_kernel import Aim, Origin, Plan, Sum, add_rows_scaled, idle_rows, take_rows
from isthmus.nn.client_program import Program, padded
from isthmus.nn.client_training import Pull, make_plan
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.kernels import Array
from isthmus.nn.optim import OptimizerState, step_plan
from isthmus.tensors import Weights


class ClientStack:
    """K clients in the memory of one.

    Args:
        program: Of all clients, compact.
        weights, states: Of each client, to begin with.
    """

    def __init__(self, program: Program, weights: Sequence[Weights], states: Sequence[OptimizerState]) -> None:
        self.program = program
        self.names = tuple(weights[0])
        self.steps = [state.steps[0] for state in states]
        self.adam = bool(states[0].first)
        self.moment_names = tuple(states[0].first)
        self._given: dict[str, Tensor] = {}  # common weights that replace everybody's, not yet written
        self._added: tuple[Tensor, dict[str, Tensor]] | None = None  # shares, and the totals of weights with them
        self._rest: dict[tuple[int, int], tuple[Array, Array]] = {}  # by term and group, see `_rest_of`
        self._like: dict[str, Tensor] = {}
        sources: list[Sequence[Weights]] = [weights]
        if self.adam:
            sources += [[state.first for state in states], [state.second for state in states]]
        dtype, height = program.dtype, program.layout.first_width
        self.rows = [empty((sum(len(part[0]) for part in program.active), height), dtype) for _ in sources]
        self.flat = [torch.zeros(program.clients, program.width, dtype=dtype) for _ in sources]
        for source, rows, flat in zip(sources, self.rows, self.flat, strict=True):
            for k, own in enumerate(source):
                program.flatten(own, flat[k : k + 1])
                for t, name in enumerate(program.first):
                    features, places = self._own(t, k)
                    take_rows(places, features, own[name].detach().contiguous().numpy(), rows.numpy())
        self.group = np.zeros(program.clients, dtype=np.int64)
        self.idle: list[Tensor] = []
        """Idle rows of every group (G, terms * F, H): weights, and moments unless the optimiser is SGD."""
        self._find_groups(sources)

    def _own(self, term: int, client: int) -> tuple[Array, Array]:
        """Features and places of a client's active rows."""
        begin, end = self.program.layout.active_start[client, term]
        at = self._bounds[term][client]
        _, feature, place = self.program.active[term]
        return feature[at : at + end - begin], place[at : at + end - begin]

    @cached_property
    def _bounds(self) -> list[Array]:
        clients = np.arange(self.program.clients)
        return [np.searchsorted(owner, clients) for owner, _, _ in self.program.active]

    def _find_groups(self, sources: Sequence[Sequence[Weights]]) -> None:
        """Clients whose idle rows agree bit for bit, and whose numbers of steps do."""
        program, first = self.program, self.program.first
        known: list[tuple[int, Array, list[Array]]] = []  # steps, which rows are known, the rows
        for k in range(program.clients):
            mine = [np.concatenate([source[k][name].detach().numpy() for name in first]) for source in sources]
            seen = np.zeros(len(mine[0]), dtype=bool)
            for t in range(len(first)):
                seen[t * program.features + self._own(t, k)[0]] = True
            for g, (steps, have, rows) in enumerate(known):
                both = have & ~seen
                if steps == self.steps[k] and all(
                    np.array_equal(a[both], b[both]) for a, b in zip(rows, mine, strict=True)
                ):
                    self.group[k] = g
                    for a, b in zip(rows, mine, strict=True):
                        a[~seen] = b[~seen]
                    have |= ~seen
                    break
            else:
                self.group[k] = len(known)
                known.append((self.steps[k], ~seen, mine))
        self.idle = [torch.from_numpy(np.stack([rows[part] for _, _, rows in known])) for part in range(len(sources))]

    # -- training ----------------------------------------------------------------------------------

    def receive(self, given: Weights) -> None:
        """Every client takes these weights in the place of its own."""
        self._given = {**self._given, **given}

    def _write_given(self, given: Weights, clients: Array | None = None) -> None:
        """Take common weights over; ``clients``: only these."""
        program, features = self.program, self.program.features
        for t, name in enumerate(program.first):
            if name not in given:
                continue
            owner, feature, place = program.active[t]
            source = given[name].detach().contiguous()
            if clients is not None:
                mine = np.isin(owner, clients)
                feature, place = feature[mine], place[mine]
            take_rows(place, feature, source.numpy(), self.rows[0].numpy())
            groups = range(len(self.idle[0])) if clients is None else np.unique(self.group[clients])
            for g in groups:
                self.idle[0][g, t * features : (t + 1) * features] = source
        self._write_flat(given, clients)

    def _write_flat(self, given: Weights, clients: Array | None) -> None:
        chosen = self.flat[0] if clients is None else self.flat[0][clients]
        self.program.flatten(given, chosen)
        if clients is not None:
            self.flat[0][clients] = chosen

    def train(
        self,
        received: Weights,
        *,
        optimizer: str,
        epochs: int,
        lr: float,
        weight_decay: float,
        pull: Pull | None,
        trained: Collection[str],
        dropout: DropoutSource | None,
        aim: Aim,
        clients: Sequence[int] | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """A round of local epochs of all clients, or of some, from ``received`` where it names a weight.

        Args:
            shares: With which `total` will be asked for, of those that train: the weights are then added up while they
                are in cache.
        """
        program = self.program
        some = clients is not None and len(clients) < program.clients
        chosen = np.asarray(clients, dtype=np.int64) if some else None
        late = {name: tensor for name, tensor in self._given.items() if chosen is not None or name not in received}
        self._given, self._added = {}, None
        if late:
            self._write_given(late)
        if chosen is not None:
            self._split(chosen)
        origin: list[Array] = []
        if all(name in received for name in program.first):  # written by the loops themselves, row by row
            origin = [received[name].detach().contiguous().numpy() for name in program.first]
            self._write_flat(received, chosen)
        else:
            self._write_given(received, chosen)
        plan = make_plan(program, step_plan(optimizer, self.steps, epochs, lr, weight_decay, program.dtype), pull)
        taking_part = list(range(program.clients)) if chosen is None else chosen.tolist()
        share, totals, added = None, list[Tensor](), None
        if shares is not None and taking_part and program.adds_up(self.rows[0], plan):
            share = self._shares(shares, clients)
            size = program.features, program.layout.first_width
            totals = [empty(size, program.dtype) for _ in program.first]
            sums = [total.numpy() for total in totals]
            added = Sum(share.astype(sums[0].dtype), sums[0], sums[-1])
        self._idle_steps(plan, taking_part, origin, share, [total.numpy() for total in totals])
        bits = program.draw(dropout, epochs, chosen)
        started = Origin(origin[0], origin[-1]) if origin else None
        loss = program.run(self.rows, self.flat, plan, bits, program.trained(trained), aim, chosen, started, added)
        if shares is not None and share is not None:
            self._added = shares, dict(zip(program.first, totals, strict=True)) | self._flat_totals(share)
        for client in taking_part:
            self.steps[client] += epochs
        return loss

    def _idle_steps(
        self,
        plan: Plan,
        clients: Sequence[int],
        origin: Sequence[Array],
        share: Array | None,
        totals: Sequence[Array],
    ) -> None:
        """The steps of the idle rows of all groups that take part, from ``origin`` where it is given; with shares,
        ``totals`` become what these rows add up to.
        """
        program, features = self.program, self.program.features
        member = {int(self.group[k]): k for k in reversed(clients)}  # the first of each group
        none = np.zeros((0, 0), dtype=plan.common.dtype)
        for g in sorted(member):
            table = plan.table[:, member[g]]
            for t, idle in enumerate(program.idle_masks):
                own = slice(t * features, (t + 1) * features)
                rest = none.reshape(-1) if share is None else self._rest_of(t, g, share)
                idle_rows(
                    idle,
                    origin[t] if origin else none,
                    None,
                    None,
                    table,
                    plan.common,
                    plan.pull,
                    plan.anchor[own] if plan.pull else plan.anchor,
                    *padded([part[g, own] for part in self.idle]),
                    rest,
                    totals[t] if totals else none,
                    g != min(member),
                )

    def _split(self, chosen: Array) -> None:
        """Clients that take part leave the groups of those that do not."""
        part = np.zeros(self.program.clients, dtype=bool)
        part[chosen] = True
        for g in range(len(self.idle[0])):
            members = self.group == g
            if (members & part).any() and (members & ~part).any():
                self.group[members & part] = len(self.idle[0])
                self._rest = {}
                self.idle = [torch.cat([rows, rows[g : g + 1]]) for rows in self.idle]

    def restart(self) -> None:
        """A fresh optimiser at every client."""
        for part in (*self.rows[1:], *self.flat[1:], *self.idle[1:]):
            part.zero_()
        self.steps = [0] * self.program.clients

    # -- results -----------------------------------------------------------------------------------

    def total(self, name: str, shares: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        """The sum over clients of share times weight."""
        program = self.program
        if name in self._given:
            return self._given[name] * float(shares.sum())
        if self._added is not None and self._added[0] is shares and name in self._added[1]:
            return self._added[1][name]
        share = self._shares(shares, clients)
        if name not in program.first:
            return self._flat_totals(share)[name]
        t = program.first.index(name)
        owner, feature, place = program.active[t]
        total = self._idle_total(t, share)
        scale = share[owner].astype(total.numpy().dtype)
        add_rows_scaled(feature, place, scale, self.rows[0].numpy(), total.numpy())
        return total

    def _shares(self, shares: Tensor, clients: Sequence[int] | None) -> Array:
        """The share of every client, zero of those that are not asked."""
        share = np.zeros(self.program.clients)
        share[slice(None) if clients is None else np.asarray(clients)] = shares.numpy()
        return share

    def _flat_totals(self, share: Array) -> dict[str, Tensor]:
        """The sums of all weights after the first layer."""
        total = torch.from_numpy(share).to(self.program.dtype) @ self.flat[0]
        places = self.program.flat.items()
        return {name: total[at : at + math.prod(shape)].view(shape) for name, (at, shape) in places}

    def _idle_total(self, t: int, share: Array) -> Tensor:
        """What the clients' idle rows add to a total of the first weights of term t."""
        program = self.program
        own = slice(t * program.features, (t + 1) * program.features)
        total = torch.zeros(program.features, program.layout.first_width, dtype=program.dtype)
        for g in range(len(self.idle[0])):
            if share[self.group == g].any():
                rest = torch.from_numpy(self._rest_of(t, g, share))
                total.addcmul_(self.idle[0][g, own], rest.unsqueeze(1))
        return total

    def _rest_of(self, t: int, g: int, share: Array) -> Array:
        """The shares of a group's clients for which a row of the first weights is idle, added up (F,)."""
        known = self._rest.get((t, g))
        if known is None or not np.array_equal(known[0], share):
            program, members = self.program, self.group == g
            owner, feature, _ = program.active[t]
            mine = members[owner]
            seen = np.bincount(feature[mine], weights=share[owner[mine]], minlength=program.features)
            everybody = np.bincount(feature[mine], minlength=program.features) == members.sum()
            rest = np.where(everybody, 0.0, share[members].sum() - seen)
            known = self._rest[t, g] = share, rest.astype(program.layout.weight.dtype)
        return known[1]

    def like(self, name: str) -> Tensor:
        """A tensor of the shape and type of each client's weight."""
        if name not in self._like:
            program = self.program
            shape = program.flat[name][1] if name in program.flat else (program.features, program.layout.first_width)
            self._like[name] = torch.empty((), dtype=program.dtype).expand(shape)
        return self._like[name]

    def row(self, name: str, client: int) -> Tensor:
        """One client's weight."""
        if name in self._given:
            return self._given[name].clone()
        return self._value(0, name, client)

    def weights(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Stacked weights (K, ...) of all clients, as a copy."""
        found = {}
        for name in self.names if names is None else names:
            if name in self._given:
                found[name] = self._given[name].expand(self.program.clients, *self._given[name].shape)
            else:
                found[name] = torch.stack([self._value(0, name, k) for k in range(self.program.clients)])
        return found

    def client(self, k: int) -> tuple[dict[str, Tensor], OptimizerState]:
        """One client's weights and optimiser state, as copies."""
        weights = {name: self.row(name, k) for name in self.names}
        moments = [
            {name: self._value(part, name, k) for name in self.moment_names} for part in range(1, len(self.rows))
        ]
        return weights, OptimizerState((self.steps[k],), *(moments or [{}, {}]))

    def _value(self, part: int, name: str, client: int) -> Tensor:
        program = self.program
        if name not in program.first:
            place, shape = program.flat[name]
            return self.flat[part][client, place : place + math.prod(shape)].view(shape).clone()
        t = program.first.index(name)
        own = slice(t * program.features, (t + 1) * program.features)
        value = empty((program.features, program.layout.first_width), program.dtype)
        value.copy_(self.idle[part][self.group[client], own])
        features, places = self._own(t, client)
        take_rows(features, places, self.rows[part].numpy(), value.numpy())
        return value

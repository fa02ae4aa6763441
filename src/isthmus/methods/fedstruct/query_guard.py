r"""How many sums over its structure features a client may answer (FedStruct spec, 6.2 and 13.8).

A query is a row of coefficients over the client's own nodes; its answer is the sum of their rows of S (or of g(S)) with
these coefficients. Whoever has asked the rows Q can compute s_u exactly if the unit vector e_u lies in the row space of
Q. With an orthonormal basis of that space that is so if and only if the leverage

.. math:: \ell_u = \sum_k b_{ku}^2 = \lVert P e_u \rVert^2

is 1. All other clients are taken for one adversary: their queries count together.

    none      every query is answered (the protocol as printed, without its counting)
    counted   the paper's rule: as many queries as there are nodes in them, less one. Unsafe: a single query over a
              single node tells its row
    safe      a query is answered while no leverage comes near 1; a limit on sparse combinations is not made
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rule = Literal["none", "counted", "safe"]
LIMIT = 1.0 - 1e-3
"""Leverage that no node may exceed: near 1 the answers determine a row up to small noise."""
NOTHING = 1e-9


class QueryGuard:
    """One target's record of what was asked.

    Args:
        nodes: Own nodes, m.
        width: Values of an answer, d: the paper's bound for fixed features counts numbers, not queries.
        values: Values of a row of S; equal to ``width`` in the direct form.
    """

    def __init__(self, rule: Rule, nodes: int, width: int, values: int) -> None:
        self.rule, self.width, self.values = rule, width, values
        self.basis = np.zeros((0, nodes))
        self.leverage = np.zeros(nodes)
        self.asked = 0
        self._used = np.zeros(nodes, dtype=bool)

    def allows(self, query: NDArray[np.floating]) -> bool:
        """Whether a query is answered; if so it is remembered."""
        row = query.astype(np.float64)
        if self.rule == "none" or not row.any():
            return True
        if self.rule == "counted":
            used = self._used | (row != 0)
            if (self.asked + 1) * self.width >= int(used.sum()) * self.values:  # c |Vt_1| < m d_s
                return False
            self._used, self.asked = used, self.asked + 1
            return True
        scale = np.linalg.norm(row)
        rest = row / scale
        for _ in range(2):  # twice is enough for an orthogonal basis
            rest = rest - self.basis.T @ (self.basis @ rest)
        size = np.linalg.norm(rest)
        if size <= NOTHING:
            return True  # what it tells is known already
        rest = rest / size
        if bool((self.leverage + rest * rest > LIMIT).any()):
            return False
        self.basis, self.leverage = np.vstack([self.basis, rest]), self.leverage + rest * rest
        return True

    def answered(self, queries: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Of rows in order, which are answered."""
        return np.array([self.allows(row) for row in queries], dtype=bool).reshape(len(queries))

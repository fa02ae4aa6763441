r"""How many sums over its structure features a client may answer (FedStruct spec, 6.2 and 13.8).

A query is a row of coefficients over the client's own nodes; its answer is the sum of their rows of S (or of g(S)) with
these coefficients. Whoever has asked the rows Q can compute s_u exactly if the unit vector e_u lies in the row space of
Q. With an orthonormal basis of that space that is so if and only if the leverage

.. math:: \ell_u = \sum_k b_{ku}^2 = \lVert P e_u \rVert^2

is 1. All other clients are taken for one adversary: their queries count together.

    none      every query is answered (the protocol as printed, without its counting)
    counted   the paper's rule: fewer numbers told than the rows of S in them have. Unsafe: a single query over a
              single node tells its row
    safe      a query is answered while no leverage comes near 1; a limit on sparse combinations is not made. Answers
              with more numbers than a row of S (Jacobians) are also counted: the leverage bounds sums alone
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
        values: Values of a row of S, d_s; C in the direct form.
    """

    def __init__(self, rule: Rule, nodes: int, values: int) -> None:
        self.rule, self.values = rule, values
        self.basis = np.zeros((0, nodes))
        self.leverage = np.zeros(nodes)
        self.told = 0
        self._counts = rule == "counted"
        self._used = np.zeros(nodes, dtype=bool)

    def allows(self, query: NDArray[np.floating], numbers: int) -> bool:
        """Whether a query is answered, with so many numbers; if so it is remembered."""
        row = query.astype(np.float64)
        if self.rule == "none" or not row.any():
            return True
        used, told = self._used | (row != 0), self.told + numbers
        self._counts |= numbers > self.values
        # c |Vt_1| < m d_s, and of Jacobians c |theta_s| |Vt_1| < m d_s
        if self._counts and told >= int(used.sum()) * self.values:
            return False
        if self.rule == "safe" and not self._keeps_apart(row):
            return False
        self._used, self.told = used, told
        return True

    def _keeps_apart(self, row: NDArray[np.float64]) -> bool:
        """Whether no node's row could be computed with this query, too."""
        rest = row / np.linalg.norm(row)
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

    def answered(self, queries: NDArray[np.floating], numbers: int) -> NDArray[np.bool_]:
        """Of rows in order, which are answered."""
        return np.array([self.allows(row, numbers) for row in queries], dtype=bool).reshape(len(queries))

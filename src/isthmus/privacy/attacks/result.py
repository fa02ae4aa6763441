"""How much an attack got."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recovery:
    """An attack's claims against the truth.

    Args:
        attack: Name of the attack.
        party: Who could have run it, from what it saw.
        claimed: Things the attack says it recovered.
        correct: Those of them that are right.
        of: Things there were to recover.
    """

    attack: str
    party: str
    claimed: int
    correct: int
    of: int

    @property
    def recall(self) -> float:
        """Share of the secrets that were recovered."""
        return self.correct / self.of if self.of else 0.0

    @property
    def precision(self) -> float:
        """Share of the claims that are right."""
        return self.correct / self.claimed if self.claimed else 0.0

    @property
    def exact(self) -> bool:
        """Everything was recovered and nothing claimed that is wrong."""
        return self.of > 0 and self.correct == self.of == self.claimed

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"recall": self.recall, "precision": self.precision, "exact": self.exact}

"""How well a drafter would do, from texts that it was not trained on.

A drafter that proposes greedily is right at depth k where its token is the text's own, so everything it is asked for
before its first mistake can be asked on the text itself. This module knows counts; it knows no drafter.
"""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Figures:
    """Counts over the positions of answers: how many there are, and at how many the first k tokens are all right."""

    positions: int = 0
    reached: list[int] = field(default_factory=list)

    def add(self, right: torch.Tensor) -> None:
        """Count positions: right [n, K], whether the k-th drafted token is the text's own."""
        found = right.long().cumprod(-1).sum(0).tolist()
        self.reached = [a + b for a, b in zip(self.reached or [0] * len(found), found, strict=True)]
        self.positions += len(right)

    @property
    def tau(self) -> float:
        """Estimated tokens per target pass, its own included: 1 + Σ_k P(the first k are right)."""
        return 1.0 + sum(self.reached) / max(self.positions, 1)

    @property
    def acceptance(self) -> list[float]:
        """P(token k is right | those before it are)."""
        before = [self.positions, *self.reached]
        return [after / earlier if earlier else 0.0 for earlier, after in zip(before, self.reached, strict=False)]

"""Layer skipping: the target's first layers, its final norm and its head draft for it.

After LayerSkip (Elhoushi et al., arXiv:2404.16710), which trains a model to exit early, and Draft & Verify (Zhang et
al., arXiv:2309.08168), which skips layers of a model as it is; this does what it can with either. Keys and values of
the first layers are the target's own, so the draft reads the target's cache, and needs no memory, no prefill and no
rollback of its own. How trees grow and tokens are drawn is the draft model's (`model`).
"""

from collections.abc import Sequence

from specdec.runtime.drafters.base import Stateless
from specdec.runtime.drafters.growth import Shape
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.kv import BorrowedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree


class LayerSkipDrafter(Stateless, ModelDrafter):
    """Drafts trees of `shape` with `model`, which borrows the cache of the target that verifies them.

    `deterministic`: as for a draft model.
    """

    def __init__(self, model: BorrowedModel, shape: Shape, *, deterministic: bool = False) -> None:
        vocab_size = model.engine.spec.vocab_size
        super().__init__(model, shape, vocab_size, vocab_size, deterministic=deterministic)
        self._borrowed = model

    def admit(self, row: Row) -> None:
        """See `Drafter.admit`: the target's row is this draft's too."""

    def prefill(self, index: int, row: Row) -> None:
        """See `Drafter.prefill`: the target's was this draft's too."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int], prices: Sequence[float] = ()) -> list[TokenTree]:
        """See `PricedDrafter.propose`; starts from what the target holds by now."""
        self._borrowed.follow()
        return super().propose(rows, limits, prices)

    def commit(self, index: int, row: Row, kept: Sequence[int]) -> None:
        """See `Drafter.commit`: the target has committed it, in the cache that both read."""

    def release(self, index: int, row: Row) -> None:
        """See `Drafter.release`: the target has moved the rows."""

    def _catch_up(self, index: int, row: Row) -> None:
        """Whatever the target holds, this draft does."""

"""What drafters learn from a target: the ends that they share with it, its distribution, and its usual tokens.

The distribution at a position is the head on the state that the data keeps (tap "final"), over the draft vocabulary and
renormalized there: the whole vocabulary's would cost more than the drafter (57 against 13 MFLOP a token for 49,152
tokens and a hidden size of 576). What it leaves out comes back in expectation, because a position only counts where the
text's own token is in the vocabulary: that happens with the mass p(D) of the target there, and p(D) times the
cross-entropy of p / p(D) is the part of the whole cross-entropy that a drafter which proposes nothing else can change.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from specdec.engines.contract import IntArray
from specdec.export.families import text_config
from specdec.train.data import TextRow


class Target:
    """The ends of a model of transformers: `embedding` [V, H] (a module) and `head` [V, H], on `device`."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.config = text_config(model.config)
        self.device = device
        self.embedding = model.get_input_embeddings().to(device)
        head = model.get_output_embeddings()
        self.head = head.weight.detach().to(device)
        self._cap = getattr(self.config, "final_logit_softcapping", None)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    def logits(self, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """The target's logits [..., Vd] for `ids` (None: all) from the states [..., H] that its head reads."""
        return self.capped(states @ (self.head if ids is None else self.head[ids]).T)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits from what the head's product gives."""
        return scores if self._cap is None else torch.tanh(scores / self._cap) * self._cap

    def agreement(self, row: TextRow, states: torch.Tensor) -> float:
        """The share of a row's answer that is the most likely token by its states [n, H]."""
        said = self.logits(states[row.answer - 1 : -1].to(self.device)).argmax(-1).cpu()
        return float((said == torch.from_numpy(row.tokens[row.answer :])).double().mean())


def soft_cross_entropy(logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [n] of softmax(logits) against the distributions `taught`, both [n, Vd]."""
    return torch.logsumexp(logits, -1) - (taught * logits).sum(-1)


def draft_vocabulary(
    rows: Iterable[TextRow], vocab_size: int, size: int, always: Iterable[int] = ()
) -> IntArray | None:
    """The `size` most frequent token ids of `rows`, ascending; the lower id first among equals. None: all there are.

    `always`: ids that are among them however rare, as those that end a text, which no row holds.
    """
    if size >= vocab_size:
        return None
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(row.tokens, minlength=vocab_size)
    counts[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts, kind="stable")[:size])

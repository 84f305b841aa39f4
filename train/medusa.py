"""Training of Medusa heads: from the state at a token, the target's distributions over the tokens that follow.

Head i reads the state at token t and is about token t + 2 + i, of which the target's state at t + 1 + i says the
distribution (Cai et al., arXiv:2401.10774, with soft labels instead of the text's token). Later heads weigh less.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from specdec.engines.contract import IntArray
from specdec.export.medusa_model import OFFSETS, MedusaConfig, MedusaModel, write_medusa
from specdec.train.batches import Batch
from specdec.train.target import Target, soft_cross_entropy

MICRO_TOKENS = 4096
DECAY = 0.8
RANKS = 10  # candidates of a head whose accuracy is counted


class MedusaLearner:
    """`heads` heads that learn from `target`; `ids` [Vd]: their vocabulary (None: the target's).

    They share one projection onto the vocabulary, which begins as the target's; the features are its last states.
    """

    micro_tokens = MICRO_TOKENS

    def __init__(self, target: Target, heads: int, ids: IntArray | None) -> None:
        vocab = len(target.head)
        config = MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=vocab,
            heads=heads,
            draft_vocab_size=None if ids is None else len(ids),
            shared_head=True,
        )
        self.model = MedusaModel(config)
        if ids is not None:
            self.model.d2t.copy_(torch.from_numpy(ids) - torch.arange(len(ids)))
        self.model.to(target.device)
        found = self.model.ids
        self._ids = torch.arange(vocab, device=target.device) if found is None else found
        self._known = torch.zeros(vocab + 1, dtype=torch.bool, device=target.device)
        self._known[self._ids] = True
        self._known[-1] = True  # where the text has ended, the target still speaks
        with torch.no_grad():
            self.model.lm_head.weight.copy_(target.head[self._ids])
        self._target = target

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum over pairs and heads, each head weighted, of the cross-entropy against the target's distribution."""
        first, states = batch.pairs(0, 0), batch.features[:, :-1]
        logits = self.model(states[first])  # [n, K, Vd]
        taught = torch.softmax(self._target.logits(batch.features[:, 1:][first], self._ids), -1)
        place = torch.zeros_like(first, dtype=torch.int64)
        place[first] = torch.arange(len(taught), device=place.device)
        total = torch.zeros((), device=taught.device)
        heads = self.model.config.heads
        scale = sum(DECAY**head for head in range(heads))
        known = self._known[batch.following]
        for head in range(heads):
            pairs = batch.pairs(0, head) & known.roll(-head, 1)
            entropy = soft_cross_entropy(logits[pairs[first], head], taught[place.roll(-head, 1)[pairs]])
            total = total + entropy.sum() * (DECAY**head / scale)
        return total

    def right(self, batch: Batch) -> torch.Tensor:
        """Whether each head's first candidate is the text's token [n, K], at all pairs that the text goes on behind."""
        return self._ranked(batch)[..., 0]

    def write(self, folder: Path, held_out: Iterable[Batch]) -> None:
        """Write the heads in float16, with the accuracy of every candidate on the texts `held_out` [heads][ranks]."""
        with torch.no_grad():
            hits = torch.cat([self._ranked(batch) for batch in held_out])
        accuracies = hits.double().mean(0).tolist()
        config = replace(self.model.config, accuracies=tuple(tuple(round(x, 4) for x in row) for row in accuracies))
        state = {name: value if name == OFFSETS else value.half() for name, value in self.model.state_dict().items()}
        write_medusa(folder, config, state)

    def _ranked(self, batch: Batch) -> torch.Tensor:
        """Whether each of the heads' best candidates is the text's token [n, K, R]."""
        heads = self.model.config.heads
        starts = batch.pairs(0, heads)
        logits = self.model(batch.features[:, :-1][starts])  # [n, K, Vd]
        ranked = self._ids[logits.topk(min(RANKS, logits.shape[-1]), -1).indices]
        text = torch.stack([batch.following.roll(-head, 1)[starts] for head in range(heads)], -1)  # [n, K]
        return ranked == text.unsqueeze(-1)

"""Rows of text → the micro-batches of each optimizer step, in an order that only the seed and the epoch decide.

Rows of like length share a micro-batch, so little is padding; padding stands behind a row, where no causal layer sees
it. This module knows lengths and positions; it knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.train.data import TextRow

LONGEST = 2048  # tokens of a row that are learned from: attention of a longer one takes too much memory
SPREAD_TOKENS = 65536
_LEAST_SPREAD = 1e-3  # of a feature that is nothing but zeros
_WINDOW = 16  # steps whose rows are sorted by length together

Step = list[list[int]]  # rows of each micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows side by side: tokens [B, S], the target's states at them, features [B, S, F], `lengths` and `answers` [B].

    Pair t of a row joins the state at token t with token t + 1, and is about token t + 2: the naming of every drafter
    that reads states. A row of n tokens has pairs 0 to n - 2; about the last the text says nothing, but the target's
    state at its later token does.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    lengths: torch.Tensor
    answers: torch.Tensor

    @property
    def following(self) -> torch.Tensor:
        """Token t + 2 of every pair t [B, S - 1]; -1 where the text has ended."""
        known = torch.nn.functional.pad(self.tokens[:, 2:], (0, 1), value=-1)
        return known.masked_fill(~self.pairs(None, 1), -1)

    def pairs(self, fed: int | None, ahead: int) -> torch.Tensor:
        """Mask [B, S - 1] of pairs t with `fed` pairs of the answer before them and `ahead` behind them.

        The first pair of an answer is that whose later token is the answer's first. `fed` None: prompts as well.
        """
        at = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device)
        ends = at <= (self.lengths - 2 - ahead)[:, None]
        return ends if fed is None else ends & (at >= (self.answers - 1 + fed)[:, None])


def collate(rows: Sequence[TextRow], columns: torch.Tensor, device: torch.device) -> Batch:
    """Put rows side by side; `columns`: which of the features' F are wanted."""
    lengths = [min(len(row.tokens), LONGEST) for row in rows]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    features = torch.zeros(len(rows), max(lengths), len(columns))
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[index, :length] = torch.from_numpy(row.tokens[:length])
        features[index, :length] = torch.from_numpy(np.array(row.features[:length]))[:, columns].float()
    answers = [row.answer for row in rows]
    return Batch(
        tokens.to(device), features.to(device), torch.tensor(lengths, device=device), torch.tensor(answers).to(device)
    )


def spread(rows: Sequence[TextRow], columns: torch.Tensor) -> torch.Tensor:
    """Root mean square of each of the features `columns` over the first `SPREAD_TOKENS` tokens of `rows` [F]."""
    total, tokens = torch.zeros(len(columns), dtype=torch.float64), 0
    for row in rows:
        total += torch.from_numpy(np.array(row.features))[:, columns].double().square().sum(0)
        tokens += len(row.tokens)
        if tokens >= SPREAD_TOKENS:
            break
    return (total / tokens).sqrt().clamp(min=_LEAST_SPREAD).float()


def learnable(row: TextRow) -> bool:
    """Whether the row has a pair to learn from: an answer that begins, and a token before it."""
    return 1 <= row.answer < min(len(row.tokens), LONGEST)


def positions(rows: Sequence[TextRow]) -> int:
    """Pairs that are learned from in all: `pairs(0, 0)` of the rows."""
    return sum(min(len(row.tokens), LONGEST) - row.answer for row in rows)


def epoch_steps(lengths: Sequence[int], step_tokens: int, micro_tokens: int, seed: int, epoch: int) -> list[Step]:
    """The steps of one epoch over rows of `lengths` tokens: each row once.

    A step has about `step_tokens` tokens, padding included, in micro-batches of at most `micro_tokens` (a longer row is
    alone in its own).
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths)).tolist()
    window = max(_WINDOW * step_tokens * len(lengths) // max(sum(lengths), 1), 1)  # rows
    smooth: list[int] = []
    for number, start in enumerate(range(0, len(order), window)):  # up and down, so that neighbours are of like length
        smooth += sorted(order[start : start + window], key=lambda row: (lengths[row], row), reverse=number % 2 == 1)
    groups = _cut(smooth, lengths, min(step_tokens, micro_tokens))
    rng.shuffle(groups)
    return _gather(groups, lengths, step_tokens)


def micro_batches(lengths: Sequence[int], micro_tokens: int) -> Step:
    """All rows once, by length."""
    return _cut(sorted(range(len(lengths)), key=lambda row: (lengths[row], row)), lengths, micro_tokens)


def _cut(rows: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Cut `rows` into groups that, padded to their longest, have `most` tokens at most."""
    groups: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, min(lengths[row], LONGEST)) if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > most:
            groups.append([])
            longest = min(lengths[row], LONGEST)
        groups[-1].append(row)
    return groups


def _gather(groups: Sequence[list[int]], lengths: Sequence[int], step_tokens: int) -> list[Step]:
    """Join micro-batches until a step is full."""
    steps: list[Step] = []
    room = 0
    for group in groups:
        size = len(group) * max(min(lengths[row], LONGEST) for row in group)
        if size > room or not steps:
            steps.append([])
            room = step_tokens
        steps[-1].append(group)
        room -= size
    return steps

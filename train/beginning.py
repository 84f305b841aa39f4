"""The drafter as a training begins with it: new, or one that was trained before.

This module knows the learners and what each is made of; it knows no loop and no folder of a run.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from specdec.engines.contract import IntArray
from specdec.engines.errors import RequestError
from specdec.export.eagle_files import draft_ids, read_eagle
from specdec.export.eagle_model import EagleConfig, default_taps, eagle_config
from specdec.export.families import text_config
from specdec.export.sources import Checkpoint
from specdec.export.taps import FINAL, check_taps
from specdec.export.tokenizer import read_tokenizer
from specdec.train.batches import Batch, spread
from specdec.train.data import TextRow
from specdec.train.distill import DistillLearner, choose_layers, pruned
from specdec.train.eagle import EagleLearner
from specdec.train.loop import Learner
from specdec.train.medusa import MedusaLearner
from specdec.train.options import DEFAULT_DRAFT_VOCAB, TrainOptions
from specdec.train.target import Target, draft_vocabulary


class Source(NamedTuple):
    """An EAGLE drafter to begin with: what its files say."""

    config: EagleConfig
    state: dict[str, torch.Tensor]


class Written(Learner, Protocol):
    """A learner that can be written as a drafter."""

    def write(self, folder: Path, held_out: Iterable[Batch]) -> None:
        """Write the drafter's files, with what has to be measured on held-out texts, if anything has."""


def read_source(folder: Path, checkpoint: Checkpoint) -> Source:
    """Read the drafter that a training is to go on from. Raises `read_eagle`'s errors, or `RequestError`."""
    source = Source(*read_eagle(folder, checkpoint.config))
    if source.config.format != "eagle3":
        raise RequestError(f"{folder} is of EAGLE-1's format: a training can begin with EAGLE-3's alone")
    return source


def chosen_taps(options: TrainOptions, checkpoint: Checkpoint, source: Source | None) -> tuple[str, ...]:
    """Hidden states that the drafter learns from, in the order of its features; the head's own last."""
    depth = text_config(checkpoint.config).num_hidden_layers
    usual = source.config.taps if source else (*default_taps(depth)[1:], FINAL)
    wanted = (options.taps or usual) if options.method == "eagle" else ()
    check_taps(wanted, depth)
    return (*wanted, FINAL)


def new_learner(
    options: TrainOptions,
    checkpoint: Checkpoint,
    target: Target,
    model: Any,
    rows: Sequence[TextRow],
    vocab_size: int,
    taps: Sequence[str],
    columns: torch.Tensor,
    source: Source | None,
) -> Written:
    """The learner of `options`, before its first step. `model`: the whole target; `columns`: of the features."""
    if options.method == "distill":
        chosen = choose_layers(options.layers, options.keep, target.config.num_hidden_layers)
        tokenizer = read_tokenizer(checkpoint)
        return DistillLearner(pruned(model, chosen), target, tokenizer, train_embeddings=options.train_embeddings)
    if source is not None:
        known = draft_ids(source.config, source.state)
        ids: IntArray | None = None if known is None else known.numpy()
        scale = spread(rows, columns[: source.config.tapped_size])
        return EagleLearner(source.config, target, ids, options.self_fed, scale, source.state)
    ends = read_tokenizer(checkpoint).record.eos_token_ids
    ids = draft_vocabulary(rows, vocab_size, options.draft_vocab or DEFAULT_DRAFT_VOCAB, ends)
    if options.method == "medusa":
        return MedusaLearner(target, options.heads, ids)
    config = eagle_config(checkpoint.config, draft_vocab_size=None if ids is None else len(ids), taps=tuple(taps[:-1]))
    return EagleLearner(config, target, ids, options.self_fed, spread(rows, columns[: config.tapped_size]))

"""Distillation: a model of some of the target's layers learns to say what the target says, as a `model:PATH` drafter.

The layers that stay begin as the target's; embedding and head are the target's own and stay as they are unless asked.
The loss is the cross-entropy against the target's distribution over its whole vocabulary (Hinton et al.,
arXiv:1503.02531): this drafter proposes with the whole head, so what it must not say counts too.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.engines.errors import RequestError
from specdec.export.layers import decoder_layers
from specdec.export.tokenizer import TokenizerFiles
from specdec.train.batches import Batch
from specdec.train.target import Target, soft_cross_entropy

MICRO_TOKENS = 1024  # each has a whole row of logits, several times over
DEPTH = 4


def choose_layers(layers: str | None, keep: int | None, total: int) -> tuple[int, ...]:
    """Which of `total` layers stay: "0-3,28,29", or `keep` of them evenly spaced, first and last among them.

    Raises `RequestError` for layers that the target does not have, or when none goes.
    """
    if layers is None:
        count = keep or 1
        chosen = [round(index * (total - 1) / max(count - 1, 1)) for index in range(count)]
    else:
        chosen = []
        for part in layers.split(","):
            first, _, last = part.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                raise RequestError(f"--layers {layers} must be layers and ranges, as in 0-3,28,29")
            chosen += range(int(first), int(last or first) + 1)
    if not chosen or sorted(set(chosen)) != chosen or chosen[-1] >= total or len(chosen) == total:
        wanted = f"--layers {layers}" if layers is not None else f"--keep {keep}"
        raise RequestError(f"{wanted} must leave fewer than all {total} layers, ascending, of 0 to {total - 1}")
    return tuple(chosen)


def pruned(model: Any, chosen: Sequence[int]) -> Any:
    """A copy of a model of transformers with the layers `chosen` only, in float32; its configuration says so."""
    small = copy.deepcopy(model).float()
    path, layers = decoder_layers(small)
    parent, _, name = path.rpartition(".")
    setattr(small.get_submodule(parent), name, torch.nn.ModuleList(layers[index] for index in chosen))
    small.config.num_hidden_layers = len(chosen)
    if getattr(small.config, "layer_types", None):
        small.config.layer_types = [small.config.layer_types[index] for index in chosen]
    for index, layer in enumerate(small.get_submodule(path)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    return small


class DistillLearner:
    """`model` (of transformers, float32) learns from `target`; its embedding and head too if `train_embeddings`."""

    micro_tokens = MICRO_TOKENS

    def __init__(self, model: Any, target: Target, tokenizer: TokenizerFiles, *, train_embeddings: bool) -> None:
        self.model = model.requires_grad_(True).to(target.device)
        for ends in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            ends.requires_grad_(train_embeddings)
        self._target, self._tokenizer = target, tokenizer

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum over the answers' positions of the cross-entropy against the target's distribution."""
        pairs = batch.pairs(0, 0)
        taught = torch.softmax(self._target.logits(batch.features[:, 1:][pairs]), -1)
        return soft_cross_entropy(self._logits(batch, pairs), taught).sum()

    def right(self, batch: Batch) -> torch.Tensor:
        """Whether the k-th token that it would draft is the text's [n, DEPTH]."""
        everywhere, starts = batch.pairs(0, 0), batch.pairs(0, DEPTH)
        found = torch.zeros_like(everywhere)
        found[everywhere] = self._logits(batch, everywhere).argmax(-1) == batch.following[everywhere]
        return torch.stack([found.roll(-step, 1)[starts] for step in range(DEPTH)], -1)

    def write(self, folder: Path, held_out: Iterable[Batch]) -> None:
        """Write a folder of Hugging Face's layout with the target's tokenizer, in float16."""
        small = copy.deepcopy(self.model).to("cpu").half()
        small.save_pretrained(folder)
        self._tokenizer.write(folder)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings | self._tokenizer.record.special_tokens, indent=2) + "\n", "utf-8"
        )

    def _logits(self, batch: Batch, pairs: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] at the later token of `pairs`: about the token behind it."""
        states = self.model.base_model(input_ids=batch.tokens).last_hidden_state
        logits: torch.Tensor = self.model.get_output_embeddings()(states[:, 1:][pairs])
        return self._target.capped(logits)

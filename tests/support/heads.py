"""Tiny Medusa heads for tiny bundles: random ones, written as a folder that `specdec-export` takes."""

import functools
from pathlib import Path
from typing import Any

import torch

from specdec.export.medusa_model import MedusaConfig, MedusaModel, write_medusa
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.sources import open_checkpoint
from support.bundles import blocks_checkpoint, session_folder, shared_checkpoint

REDUCED = 24  # ids of a reduced vocabulary, of those below 100
ACCURACIES = ((0.6, 0.2, 0.1), (0.4, 0.15, 0.05), (0.2, 0.1, 0.05))


def random_heads(hidden_size: int, vocab_size: int, seed: int = 0, **changes: Any) -> MedusaModel:
    """Heads whose every parameter is random; with `draft_vocab_size`, of as many ids, every third or so."""
    config = MedusaConfig(
        **{"hidden_size": hidden_size, "vocab_size": vocab_size, "heads": 3, "accuracies": ACCURACIES, **changes}
    )
    model, generator = MedusaModel(config), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * (1.5 / hidden_size**0.5 if parameter.dim() > 1 else 0.3))
    if config.draft_vocab_size is not None:
        ids = torch.randperm(vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        model.d2t.copy_(ids - torch.arange(len(ids)))
    return model.eval()


def heads_folder(checkpoint: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder of random heads for `checkpoint`, that all tests of a run share."""
    return _folder(checkpoint, seed, tuple(changes.items()))


def medusa_bundle(precision: str = "fp32", **changes: Any) -> Path:
    """A tiny bundle with random heads, that all tests of a run share."""
    return _bundle(precision, tuple(changes.items()))


@functools.cache
def _folder(checkpoint: Path, seed: int, changes: tuple[tuple[str, Any], ...]) -> Path:
    config = open_checkpoint(str(checkpoint)).config
    with torch.no_grad():
        heads = random_heads(config.hidden_size, config.vocab_size, seed, **dict(changes))
    name = "-".join(str(part) for part in (checkpoint.name, seed, *(value for pair in changes for value in pair)))
    folder = session_folder() / f"heads-{name}"
    write_medusa(folder, heads.config, heads.state_dict())
    return folder


@functools.cache
def _bundle(precision: str, changes: tuple[tuple[str, Any], ...]) -> Path:
    checkpoint = shared_checkpoint() if precision in ("fp32", "fp16") else blocks_checkpoint()
    name = "-".join(str(value) for pair in changes for value in pair)
    options = ExportOptions(
        model=str(checkpoint),
        output=session_folder() / f"bundle-medusa-{precision}-{name}",
        drafters=("ngram", f"medusa:{heads_folder(checkpoint, **dict(changes))}"),
        precision=precision,
    )
    export_bundle(options)
    return options.output

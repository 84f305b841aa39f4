"""Tiny Medusa heads for tiny bundles, random or with a few texts learnt by heart, as folders and in bundles."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.export.medusa_model import MedusaConfig, MedusaModel, write_medusa
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.sources import open_checkpoint
from support.bundles import TOKENIZER_SIZE, blocks_checkpoint, session_folder, shared_checkpoint

PROMPTS = [[40, 41, 42, 43, 40, 41], [5, 90, 150], [210], [7, 8, 9, 10, 11, 12, 13, 14, 15]]
ANSWER = 40  # tokens after each that the heads know
ACCURACIES = ((0.6, 0.2, 0.1), (0.4, 0.15, 0.05), (0.2, 0.1, 0.05))


def random_heads(hidden_size: int, vocab_size: int, seed: int = 0, **changes: Any) -> MedusaModel:
    """Heads whose every parameter is random; with `draft_vocab_size`, of so many ids of the target's."""
    config = MedusaConfig(
        **{"hidden_size": hidden_size, "vocab_size": vocab_size, "heads": 3, "accuracies": ACCURACIES, **changes}
    )
    model, generator = MedusaModel(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (1.5 / hidden_size**0.5 if parameter.dim() > 1 else 0.3))
        if config.draft_vocab_size is not None:
            ids = torch.randperm(vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
            model.d2t.copy_(ids - torch.arange(len(ids)))
    return model.eval()


def torch_target(checkpoint: Path) -> Any:
    """The checkpoint as PyTorch has it."""
    return open_checkpoint(str(checkpoint)).load(torch.float32)


def greedy_texts(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What PyTorch's `model` says after each prompt, prompt included, one token after another."""
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        for _ in range(tokens):
            with torch.inference_mode():
                text.append(int(model(torch.tensor([text])).logits[0, -1, :TOKENIZER_SIZE].argmax()))
    return texts


def final_states(model: Any, text: Sequence[int]) -> torch.Tensor:
    """PyTorch's last hidden states [len(text), H]."""
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states[-1][0]
    return states


def learn(heads: MedusaModel, model: Any, texts: Sequence[Sequence[int]], steps: int = 120) -> None:
    """Let `heads` know by heart what follows in `texts`: head i at token t the token t + 2 + i."""
    number = {int(token): place for place, token in enumerate(target_ids(heads))}
    states = torch.cat([final_states(model, text) for text in texts])
    right = torch.full((len(states), heads.config.heads), -100)  # -100: what cross_entropy leaves out
    start = 0
    for text in texts:
        for place, head in np.ndindex(len(text), heads.config.heads):
            if place + 2 + head < len(text):
                right[start + place, head] = number.get(text[place + 2 + head], -100)
        start += len(text)
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(heads(states).flatten(0, 1), right.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def target_ids(heads: MedusaModel) -> torch.Tensor:
    """The target's ids of the heads' logits."""
    return torch.arange(heads.config.vocab_size) if heads.ids is None else heads.ids


def heads_folder(checkpoint: Path, **changes: Any) -> Path:
    """A folder of heads that know the checkpoint's answers to `PROMPTS`; all tests of a run share it."""
    return _folder(checkpoint, tuple(changes.items()))


def medusa_bundle(precision: str = "fp32", **changes: Any) -> Path:
    """A tiny bundle with such heads; all tests of a run share it."""
    return _bundle(precision, tuple(changes.items()))


def medusa_checkpoint(precision: str = "fp32") -> Path:
    """What the bundle of this precision is made of."""
    return shared_checkpoint() if precision in ("fp32", "fp16") else blocks_checkpoint()


@functools.cache
def _folder(checkpoint: Path, changes: tuple[tuple[str, Any], ...]) -> Path:
    model = torch_target(checkpoint)
    heads = random_heads(model.config.hidden_size, model.config.vocab_size, **dict(changes))
    learn(heads, model, greedy_texts(model, PROMPTS, ANSWER))
    folder = session_folder() / "-".join(("heads", checkpoint.name, *(str(value) for _, value in changes)))
    write_medusa(folder, heads.config, heads.state_dict())
    return folder


@functools.cache
def _bundle(precision: str, changes: tuple[tuple[str, Any], ...]) -> Path:
    checkpoint = medusa_checkpoint(precision)
    name = "-".join(str(value) for pair in changes for value in pair)
    options = ExportOptions(
        model=str(checkpoint),
        output=session_folder() / f"bundle-medusa-{precision}-{name}",
        drafters=("ngram", f"medusa:{heads_folder(checkpoint, **dict(changes))}"),
        precision=precision,
    )
    export_bundle(options)
    return options.output

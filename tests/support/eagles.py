"""Tiny EAGLE drafters with random weights, in both public formats, and bundles that hold one."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specdec.export.eagle_files import EMBEDDING, HEAD, IDS, MEMBERS, write_eagle
from specdec.export.eagle_model import EagleConfig, EagleModel, eagle_config
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from support.bundles import blocks_checkpoint

TAPS = ("1", "final")
DRAFTED = 200  # tokens of the reduced vocabulary
FORMATS = ("eagle3", "eagle")


def random_eagle(
    target: PretrainedConfig, form: str, drafted: int | None = None, seed: int = 0
) -> tuple[EagleConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors as files have them; `drafted`: size of a reduced vocabulary."""
    torch.manual_seed(seed)
    if form == "eagle":
        config = eagle_config(target, format="eagle", taps=("final",), bias=True)
    else:
        config = eagle_config(target, taps=TAPS, draft_vocab_size=drafted)
    state = {name: torch.randn(value.shape) * 0.2 for name, value in EagleModel(config).state_dict().items()}
    state = {name: 1 + value if "norm" in name else value for name, value in state.items()}
    del state[EMBEDDING]
    if form == "eagle":
        del state[HEAD]
    elif drafted is not None:
        ids = torch.randperm(target.vocab_size)[:drafted].sort().values
        state[IDS] = ids - torch.arange(drafted)
        state[MEMBERS] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return config, state


def eagle_folder(path: Path, checkpoint: Path, form: str, drafted: int | None = None, seed: int = 0) -> Path:
    """Write a random drafter for the target in the folder `checkpoint` to `path`. Returns `path`.

    That of form "eagle" brings the target's embedding along, as public ones do.
    """
    config, state = random_eagle(AutoConfig.from_pretrained(checkpoint), form, drafted, seed)
    if form == "eagle":
        state[EMBEDDING] = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    write_eagle(path, config, state)
    return path


def eagle_bundle(form: str = "eagle3", precision: str = "fp32") -> Path:
    """A tiny bundle with a random drafter that all tests of a run share; do not change it (copy it first)."""
    return _bundle(form, precision)


@functools.cache
def shared_eagle(form: str) -> Path:
    """The folder of the shared bundles' drafter."""
    return eagle_folder(_folder() / form, blocks_checkpoint(), form, DRAFTED)


@functools.cache
def _bundle(form: str, precision: str) -> Path:
    drafter, output = shared_eagle(form), _folder() / f"bundle-{form}-{precision}"
    options: dict[str, Any] = {"model": str(blocks_checkpoint()), "output": output, "precision": precision}
    export_bundle(ExportOptions(drafters=("ngram", f"eagle:{drafter}"), **options))
    return output


def target_model() -> Any:
    """The bundles' target in PyTorch."""
    return AutoModelForCausalLM.from_pretrained(blocks_checkpoint()).eval()


@functools.cache
def _folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="specdec-tests-")
    _held.append(holder)
    return Path(holder.name)


_held: list[tempfile.TemporaryDirectory[str]] = []

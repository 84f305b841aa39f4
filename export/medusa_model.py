"""Medusa heads as a PyTorch module, and the folder that holds them.

After Cai et al. (arXiv:2401.10774): head i reads the target's last hidden state (behind the final norm, the tap
"final") at token t and predicts token t + 2 + i, since the target itself predicts t + 1. A head is one or more residual
blocks x + silu(linear(x)) and a projection onto the vocabulary. The folder is that of FasterDecoding/Medusa
(config.json with `medusa_num_heads` and `medusa_num_layers`; tensors `{head}.{block}.linear.weight`, `.bias` and
`{head}.{blocks}.weight`), as safetensors. Beyond it, all heads may share one projection, `lm_head.weight`, and the
vocabulary may be reduced: `d2t` (as in EAGLE-3's public checkpoints) says that the head's token i is the target's
i + d2t[i]. This module knows numbers and files; it knows no graph.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.engines.errors import SourceError
from specdec.engines.files import replace_file
from specdec.export.families import text_config
from specdec.export.sources import PICKLES, read_json

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")  # ours, and what the public .pt files convert to
OFFSETS, SHARED = "d2t", "lm_head.weight"
_OURS = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "draft_vocab_size", "accuracies")
_PUBLIC = ("base_model_name_or_path", "model_type", "architectures", "torch_dtype", "dtype", "transformers_version",
           "version")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Sizes of the heads. `vocab_size`: of the target; `draft_vocab_size`: of the heads, None where it is the same.

    `shared_head`: one projection onto the vocabulary for all heads. `accuracies` [heads][ranks]: share of positions at
    which the head's candidate of this rank is the right token, empty when it was not measured.
    """

    hidden_size: int
    vocab_size: int
    heads: int
    layers: int = 1
    draft_vocab_size: int | None = None
    shared_head: bool = False
    accuracies: tuple[tuple[float, ...], ...] = ()

    @property
    def logits_size(self) -> int:
        """Size Vd of a head's logits."""
        return self.draft_vocab_size or self.vocab_size


class ResBlock(nn.Module):
    """x + silu(linear(x)), x [..., H]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return x + nn.functional.silu(self.linear(x))


class MedusaModel(nn.Module):
    """The heads of `config`; names of parameters and buffers are the file's.

    Blocks start at zero, as in the reference training: a head begins as its projection of the target's state.
    """

    d2t: torch.Tensor  # [Vd] int64, a buffer of heads with a reduced vocabulary

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        for head in range(config.heads):
            parts: list[nn.Module] = [ResBlock(config.hidden_size) for _ in range(config.layers)]
            if not config.shared_head:
                parts.append(nn.Linear(config.hidden_size, config.logits_size, bias=False))
            self.add_module(str(head), nn.Sequential(*parts))
        if config.shared_head:
            self.lm_head = nn.Linear(config.hidden_size, config.logits_size, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer(OFFSETS, torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        for block in self.modules():
            if isinstance(block, ResBlock):
                nn.init.zeros_(block.linear.weight)
                nn.init.zeros_(block.linear.bias)

    @property
    def ids(self) -> torch.Tensor | None:
        """The target's ids [Vd] that the logits are of, ascending; None: all, in their order."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., heads, Vd] from the target's last hidden states [..., H]."""
        found = torch.stack([self.get_submodule(str(head))(states) for head in range(self.config.heads)], dim=-2)
        logits: torch.Tensor = self.lm_head(found) if self.config.shared_head else found
        return logits


def write_medusa(folder: Path, config: MedusaConfig, state: Mapping[str, torch.Tensor]) -> None:
    """Write heads (`MedusaModel.state_dict()`) to `folder`, each file in one step, the configuration last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
    _check_tensors(folder, config, tensors)
    record: dict[str, Any] = {
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    if config.draft_vocab_size is not None:
        record["draft_vocab_size"] = config.draft_vocab_size
    if config.accuracies:
        record["accuracies"] = config.accuracies
    replace_file(folder / WEIGHTS[0], lambda path: save_file(tensors, path))
    replace_file(folder / CONFIG, lambda path: path.write_text(json.dumps(record, indent=2) + "\n", "utf-8"))


def read_medusa(folder: Path, target_config: Any) -> MedusaModel:
    """Read heads, in float32, for the target of `target_config` (a configuration of transformers).

    Raises `SourceError` for a folder that is not whole, of another format, or made for another target.
    """
    if not (folder / CONFIG).is_file():
        raise SourceError(f"{folder} has no {CONFIG}: not a folder of Medusa heads")
    record = read_json(folder / CONFIG)
    tensors = _read_tensors(folder)
    config = _config(folder, record, tensors, text_config(target_config))
    _check_tensors(folder, config, tensors)
    if config.draft_vocab_size is not None:
        _check_offsets(folder, config, tensors[OFFSETS])
    model = MedusaModel(config)
    model.load_state_dict(tensors)
    return model.float().eval().requires_grad_(False)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            raise SourceError(
                f"{folder} has pickled weights only ({pickles[0]}), which can run code: convert them where you trust "
                f"them, safetensors.torch.save_file(torch.load({pickles[0]!r}), {WEIGHTS[0]!r})"
            )
        raise SourceError(f"{folder} has no weights: neither {WEIGHTS[0]} nor {WEIGHTS[1]}")
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError) as exc:
        raise SourceError(f"{path} is truncated or damaged: {str(exc).splitlines()[0]}") from exc
    return tensors


def _config(folder: Path, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: Any) -> MedusaConfig:
    """The configuration in `record`, with what a public one leaves out; checked against the target."""
    path = folder / CONFIG
    if unknown := sorted(set(record) - {*_OURS, *_PUBLIC}):
        raise SourceError(f"{path} has the field {unknown[0]}, which is not one of Medusa heads")
    sizes = {"medusa_num_layers": 1, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **record}
    for name in ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "draft_vocab_size"):
        value = sizes.get(name)
        if value is None and name == "draft_vocab_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SourceError(f"{path}: {name} must be a whole number of at least 1, not {value!r}")
    for name in ("hidden_size", "vocab_size"):
        if sizes[name] != getattr(target, name):
            raise SourceError(f"{path}: heads of {name} {sizes[name]}, the target's is {getattr(target, name)}")
    heads, reduced = sizes["medusa_num_heads"], sizes.get("draft_vocab_size")
    held = len({name.partition(".")[0] for name in tensors} - {SHARED.partition(".")[0], OFFSETS})
    if held != heads:
        raise SourceError(f"{path} says medusa_num_heads {heads}, the weights are of {held}: correct the number")
    if reduced is None and OFFSETS in tensors:
        reduced = tensors[OFFSETS].numel()
    return MedusaConfig(
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        heads=heads,
        layers=sizes["medusa_num_layers"],
        draft_vocab_size=reduced,
        shared_head=SHARED in tensors,
        accuracies=_accuracies(path, sizes.get("accuracies", ()), heads),
    )


def _accuracies(path: Path, found: Any, heads: int) -> tuple[tuple[float, ...], ...]:
    if not found:
        return ()
    rows = found if isinstance(found, list) else []
    numbers = [value for row in rows if isinstance(row, list) for value in row]
    if (
        len(rows) != heads
        or not all(isinstance(row, list) and row for row in rows)
        or not all(isinstance(value, int | float) and 0 <= value <= 1 for value in numbers)
    ):
        raise SourceError(f"{path}: accuracies must be shares from 0 to 1, a list of ranks for each of {heads} heads")
    return tuple(tuple(map(float, row)) for row in rows)


def _check_tensors(folder: Path, config: MedusaConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `SourceError` unless `tensors` are those of `config`, in name and shape."""
    with torch.device("meta"):
        wanted = {name: list(tensor.shape) for name, tensor in MedusaModel(config).state_dict().items()}
    if missing := sorted(set(wanted) - set(tensors)):
        raise SourceError(f"{folder} lacks the tensor {missing[0]} ({len(missing)} missing in all)")
    if unknown := sorted(set(tensors) - set(wanted)):
        raise SourceError(f"{folder} has the tensor {unknown[0]}, which is not one of Medusa heads of its config")
    for name, shape in wanted.items():
        if list(tensors[name].shape) != shape:
            raise SourceError(f"{folder}: {name} has shape {list(tensors[name].shape)}, the target needs {shape}")


def _check_offsets(folder: Path, config: MedusaConfig, offsets: torch.Tensor) -> None:
    ids = torch.arange(len(offsets)) + offsets
    if offsets.dtype != torch.int64 or bool((ids[1:] <= ids[:-1]).any()):
        raise SourceError(f"{folder}: {OFFSETS} must be int64 and give ascending ids, each once")
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < config.vocab_size:
        raise SourceError(f"{folder}: {OFFSETS} gives ids outside the target's vocabulary of {config.vocab_size}")

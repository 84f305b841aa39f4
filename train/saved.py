"""State of a training on the disk: one safetensors file, whole or not there; no pickle, which could run code.

Tensors by name; what is not a tensor is a JSON record in the file's header. This module knows files; it knows no model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec.engines.errors import RequestError
from specdec.engines.files import replace_file

_RECORD = "record"
R = TypeVar("R", bound=msgspec.Struct)


def save_state(path: Path, record: msgspec.Struct, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `record` and `tensors` to `path`; a reader finds the old file or the new one."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {_RECORD: msgspec.json.encode(record).decode()}
    replace_file(path, lambda partial: save_file(stored, partial, metadata))


def load_state(path: Path, kind: type[R]) -> tuple[R, dict[str, torch.Tensor]]:
    """Read what `save_state` wrote. Raises `RequestError` when it is damaged or of another version."""
    try:
        with safe_open(path, "pt") as stored:
            record = msgspec.json.decode((stored.metadata() or {})[_RECORD], type=kind)
            return record, {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, KeyError, msgspec.MsgspecError) as exc:
        raise RequestError(f"{path} cannot be gone on from ({exc}): --force trains anew") from exc

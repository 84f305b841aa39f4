"""MODEL as a user types it → a `Checkpoint`: config and metadata read, weights not yet loaded.

Three sources: a Hugging Face folder with safetensors, a hub id, a GGUF file. Nothing that could run code is opened:
pickle weights are refused, and a checkpoint's own Python only runs when the user asked for it. Every failure is a
`SourceError` of one line. This module knows nothing of graphs, bundles or tokenizers.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers.integrations.gguf.reader import read_gguf_metadata

from specdec.engines.errors import SourceError, UnsupportedModelError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["original/*", "onnx/*", "openvino/*", "adapter_*"]
_GGUF_EXTRAS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were checked. `name` holds no path; `path` is the folder or the GGUF file.

    `metadata` are a GGUF's keys (arrays of strings as their lengths); empty for a folder.
    """

    name: str
    format: Literal["safetensors", "gguf"]
    path: Path
    config: transformers.PretrainedConfig
    trust_remote_code: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def read_json(self, name: str) -> dict[str, Any]:
        """Content of a JSON file beside the weights; empty when there is none. Raises `SourceError` when broken."""
        if self.format == "gguf" or not (self.path / name).is_file():
            return {}
        return read_json(self.path / name)

    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or what the model's config says about its special tokens."""
        if stored := self.read_json("generation_config.json"):
            return stored
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: value for name in names if (value := getattr(self.config, name, None)) is not None}

    def load(self, dtype: torch.dtype) -> transformers.PreTrainedModel:
        """Load the weights on the CPU, once, in `dtype`; gradients off, evaluation mode.

        Raises `SourceError` when a weight is missing, has another shape, or cannot be read.
        """
        options: dict[str, Any] = {"dtype": dtype, "config": self.config, "output_loading_info": True}
        if self.format == "gguf":
            options |= {"gguf_file": self.path.name}
        else:
            options |= {"use_safetensors": True, "trust_remote_code": self.trust_remote_code, "local_files_only": True}
        folder = self.path.parent if self.format == "gguf" else self.path
        try:
            with _one_name_map():
                loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options)
        except Exception as exc:  # transformers, safetensors and gguf raise what they like: OSError to RuntimeError
            raise SourceError(f"the weights of {self.path} cannot be loaded: {_first_line(exc)}") from exc
        model, info = loaded
        for problem in ("missing_keys", "mismatched_keys"):
            if broken := sorted(str(key) for key in info.get(problem) or ()):
                kind = problem.removesuffix("_keys")
                raise SourceError(
                    f"{self.path} is not a whole checkpoint: {len(broken)} {kind} weights ({broken[0]} ...)"
                )
        if self.format == "gguf":  # leftovers of the de-quantization: the weights are plain now
            for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
                if hasattr(holder, name):
                    delattr(holder, name)
            model.is_quantized = False
        ready: transformers.PreTrainedModel = model.eval().requires_grad_(False)
        return ready


def open_checkpoint(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Resolve MODEL (folder, hub id `org/name`, `.gguf` file) and check its files; loads no weights.

    Raises `SourceError` (unreadable, unreachable, unsafe, incomplete) or `UnsupportedModelError` (already quantized).
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path.resolve(), path.resolve().name, trust_remote_code)
    if path.is_file():
        return _open_file(path.resolve())
    if path.suffix == ".gguf":
        raise SourceError(f"{model} does not exist")
    if _HUB_ID.fullmatch(model):
        return _open_folder(_download(model, revision, trust_remote_code), model, trust_remote_code)
    raise SourceError(f"{model} is neither a folder, a .gguf file nor a hub id (org/name)")


@contextmanager
def _one_name_map() -> Iterator[None]:
    """transformers asks gguf for the same map of tensor names once per sub-module: hundreds of times, seconds."""
    original = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(original)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = original


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in {pattern[1:] for pattern in PICKLES}:
        raise SourceError(f"{path} holds pickled weights, which can run code: {_HOW_TO_CONVERT}")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise SourceError(f"{path} is not a GGUF file (pass the folder of a safetensors checkpoint, not one file)")
    try:
        metadata, tensors = read_gguf_metadata(str(path))
        config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as exc:  # the readers meet a damaged file as IndexError, struct.error, ValueError ...
        if "architecture" in str(exc):
            raise UnsupportedModelError(f"{path}: {_first_line(exc)}") from exc
        raise SourceError(f"{path} is truncated or damaged: {_first_line(exc)}") from exc
    architecture = metadata["general.architecture"]
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    extras = [name for name in tensors if name in _GGUF_EXTRAS] + [f"rope scaling {scaling}"] * (scaling != "none")
    if extras:  # transformers' reader drops them, and the text would be garbage beyond the trained length
        raise UnsupportedModelError(
            f"{path} carries {extras[0]}, which the GGUF reader drops: use the original checkpoint"
        )
    return Checkpoint(name=path.stem, format="gguf", path=path, config=config, metadata=metadata)


def _open_folder(folder: Path, name: str, trust_remote_code: bool) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} has no config.json: not a Hugging Face checkpoint")
    raw = read_json(folder / "config.json")
    _check_code(folder, raw, trust_remote_code)
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(f"{folder} is already quantized ({method}): pass the original checkpoint")
    _check_weights(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as exc:  # validation errors of any class, and remote code's own
        raise SourceError(f"{folder}/config.json is not usable: {_first_line(exc)}") from exc
    return Checkpoint(name=name, format="safetensors", path=folder, config=config, trust_remote_code=trust_remote_code)


def _check_code(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    """Refuse custom code unless trusted. A family that transformers has itself runs without the folder's code."""
    if "auto_map" in config and not trusted and config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise SourceError(
            f"{folder} needs Python code of its own (auto_map in config.json): "
            "read that code, then pass --trust-remote-code to run it"
        )


_HOW_TO_CONVERT = (
    "convert them where you trust them, with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True)"
)


def _check_weights(folder: Path) -> None:
    """Check that every safetensors file is there and whole (its header covers exactly its bytes); reads no weights."""
    if (folder / INDEX).is_file():
        shards = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        if missing := [shard for shard in shards if not (folder / shard).is_file()]:
            raise SourceError(
                f"{folder} is incomplete: {len(missing)} of {len(shards)} shards missing ({missing[0]} ...)"
            )
    else:
        shards = [SINGLE] if (folder / SINGLE).is_file() else []
    if not shards:
        if pickles := sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
            raise SourceError(
                f"{folder} has pickled weights only ({pickles[0]}), which can run code: {_HOW_TO_CONVERT}"
            )
        raise SourceError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    for shard in shards:
        try:
            with safe_open(str(folder / shard), framework="pt"):
                pass
        except (SafetensorError, OSError) as exc:
            raise SourceError(f"{folder / shard} is truncated or damaged: {_first_line(exc)}") from exc


def _download(repo: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Fetch the files that an export reads (no pickles) into the hub's own cache."""
    at = f" at revision {revision}" if revision else ""
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED))
    except GatedRepoError as exc:
        raise SourceError(
            f"{repo} is gated: accept its licence on huggingface.co, then log in with `hf auth login`"
        ) from exc
    except RevisionNotFoundError as exc:
        raise SourceError(f"{repo} has no revision {revision}") from exc
    except RepositoryNotFoundError as exc:
        raise SourceError(f"{repo} is neither a folder here nor a public model on huggingface.co") from exc
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as exc:
        raise SourceError(
            f"{repo}{at} is not here and the hub is not reachable: pass a folder or a .gguf file"
        ) from exc
    except HfHubHTTPError as exc:
        raise SourceError(f"{repo}{at}: the hub answered: {_first_line(exc)}") from exc
    except OSError as exc:  # connection errors of the HTTP client, a full disk
        raise SourceError(f"{repo}{at} cannot be downloaded: {_first_line(exc)}") from exc


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises `SourceError` when it is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise SourceError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise SourceError(f"{path} is not a JSON object")
    return content


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), "") or type(exc).__name__

"""EAGLE's drafters on disk: a folder with `config.json` and `model.safetensors`, in the reference's public formats.

Read, checked against the target that they are to draft for, and written. This module knows names, shapes and reasons to
refuse; what the tensors do is `eagle_model`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig

from specdec.engines.errors import PairError, SourceError, UnsupportedModelError
from specdec.engines.files import replace_file
from specdec.export.eagle_model import EagleConfig, EagleModel, default_taps
from specdec.export.families import check_supported, text_config
from specdec.export.taps import FINAL

WEIGHTS = "model.safetensors"
EMBEDDING, HEAD, IDS, MEMBERS = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
# Taps. At the top (vLLM) a number says after how many layers; in the section (SGLang, NVIDIA) it is a layer's index.
_SECTION, _TAPS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
_OTHER_MATHEMATICS = ("norm_before_residual", "target_hidden_size", "speculators_model_type")  # of other toolkits


def read_eagle(path: Path, target: PretrainedConfig) -> tuple[EagleConfig, dict[str, torch.Tensor]]:
    """Read the folder `path`, a drafter for the target of configuration `target`.

    Returns its configuration and its tensors by public name: without embedding or head it uses the target's. Raises
    `SourceError` (unreadable), `UnsupportedModelError` (a drafter of another kind) or `PairError` (it is of another
    target), which say what differs.
    """
    text: Any = text_config(target)
    raw, state = _read_config(path), _read_tensors(path)
    config = _parse(path, raw, state, text.num_hidden_layers)
    for name in ("hidden_size", "vocab_size"):
        own, needed = getattr(config.llama, name), getattr(text, name)
        if own != needed:
            raise PairError(f"{path} drafts for a target of {name} {own}; this one's is {needed}")
    deepest = max((int(tap) for tap in config.taps if tap != FINAL), default=0)
    if deepest > text.num_hidden_layers:
        raise PairError(f"{path} reads what {deepest} layers leave, the target has {text.num_hidden_layers}")
    _check_tensors(path, config, state)
    return config, state


def draft_ids(config: EagleConfig, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Target ids [Vd] of what the drafter's head knows, in its order; None: they are the target's own."""
    if IDS not in state:
        return None
    return torch.arange(config.draft_vocab_size) + state[IDS].long()


def write_eagle(
    folder: Path, config: EagleConfig, state: Mapping[str, torch.Tensor], extra: Mapping[str, Any] | None = None
) -> None:
    """Write a drafter that `read_eagle` reads; `extra`: more keys of config.json. Either file is whole or not there."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "attention_bias",
             "mlp_bias", "rope_parameters", "tie_word_embeddings")  # fmt: skip
    taps = [tap if tap == FINAL else int(tap) for tap in config.taps]
    of_format = {"draft_vocab_size": config.draft_vocab_size, _TAPS: taps}
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.format == "eagle3" else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        **{name: getattr(config.llama, name) for name in names},
        **(of_format if config.format == "eagle3" else {}),
        **(extra or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    replace_file(folder / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
    replace_file(folder / "config.json", lambda path: path.write_text(json.dumps(raw, indent=2), "utf-8"))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise SourceError(f"{path} is no drafter: its config.json cannot be read ({exc})") from exc
    if not isinstance(raw, dict):
        raise SourceError(f"{path}/config.json is not a JSON object")
    return raw


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS
    if not file.is_file():
        raise SourceError(f"{path} has no {WEIGHTS}; convert pickled weights with safetensors.torch.save_file")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as exc:
        raise SourceError(f"{file} is truncated or damaged: {exc}") from exc


def _parse(path: Path, raw: Mapping[str, Any], state: Mapping[str, torch.Tensor], layers: int) -> EagleConfig:
    """The configuration: what config.json says, and what only the names of the tensors do."""
    for name in _OTHER_MATHEMATICS:
        if raw.get(name):
            raise UnsupportedModelError(f"{path} is a drafter with {name} {raw[name]}, which this version cannot run")
    try:
        llama = LlamaConfig(**{"num_hidden_layers": 1, **raw})
    except (TypeError, ValueError) as exc:
        raise SourceError(f"{path}/config.json is not usable: {exc}") from exc
    if raw.get("model_type", "llama") != "llama" or llama.num_hidden_layers != 1:
        kind = f"{raw.get('model_type', 'llama')} with {llama.num_hidden_layers} layers"
        raise UnsupportedModelError(f"{path} is a {kind}: a drafter is one llama layer")
    check_supported(llama)
    if any(name.startswith("midlayer.") for name in state):
        nested = (raw.get(_SECTION) or {}).get(_TAPS)
        found = raw.get(_TAPS) or nested or default_taps(layers)
        behind = 1 if found is nested else 0  # there a layer is named by its index, so that 0 is behind one layer
        for tap in found:
            if tap != FINAL and not (str(tap).isdecimal() and int(tap) + behind > 0):
                raise SourceError(f"{path}/config.json: {_TAPS} holds {tap!r}, not a number of layers or {FINAL!r}")
        taps = tuple(tap if tap == FINAL else str(int(tap) + behind) for tap in found)
        known = raw.get("draft_vocab_size") or llama.vocab_size
        return EagleConfig(llama=llama, taps=taps, draft_vocab_size=int(known), bias="fc.bias" in state)
    return EagleConfig(
        llama=llama, format="eagle", taps=(FINAL,), draft_vocab_size=llama.vocab_size, bias="fc.bias" in state
    )


def _check_tensors(path: Path, config: EagleConfig, state: Mapping[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in EagleModel(config).state_dict().items()}
    vocab, drafted = config.llama.vocab_size, config.draft_vocab_size
    wanted |= {IDS: (drafted,), MEMBERS: (vocab,)}
    optional = {EMBEDDING, IDS, MEMBERS} | ({HEAD} if drafted == vocab else set())
    if missing := sorted(wanted.keys() - optional - state.keys()):
        raise UnsupportedModelError(f"{path} is no {config.format} drafter: it has no {missing[0]}")
    if strange := sorted(state.keys() - wanted.keys()):
        raise UnsupportedModelError(f"{path} is no {config.format} drafter that is known: it has {strange[0]} as well")
    for name, tensor in state.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UnsupportedModelError(f"{path}: {name} is {list(tensor.shape)}, its config says {list(wanted[name])}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise SourceError(f"{path}: {name} holds numbers that are not finite")
    ids = draft_ids(config, state)
    if ids is None and drafted != vocab:
        raise UnsupportedModelError(f"{path} knows {drafted} of {vocab} tokens and has no {IDS} that says which")
    if ids is None:
        return
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise SourceError(f"{path}: {IDS} does not give ascending ids of a vocabulary of {vocab}")
    if MEMBERS in state and not torch.equal(state[MEMBERS].nonzero().flatten(), ids):
        raise SourceError(f"{path}: {IDS} and {MEMBERS} name other tokens")

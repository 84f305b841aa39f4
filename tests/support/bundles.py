"""A tiny checkpoint with a real tokenizer, and real bundles made of it: what runtime and export tests run on.

Random weights, but everything else is as users have it: safetensors, byte-level BPE trained here, ChatML template,
logits padded beyond the tokenizer. Nothing is downloaded.
"""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_SIZE = 320
LOGITS_SIZE = 336  # padded: ids from TOKENIZER_SIZE on mean nothing
MAX_LENGTH = 1024
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a target and a draft: the draft guesses and the target decides",
    "def add(a, b):\n    return a + b\n",
    "one, two, three; 1 2 3 4 5 6 7 8 9 10",
)

_SHAPE: dict[str, Any] = {
    "vocab_size": LOGITS_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"original_max_position_embeddings": MAX_LENGTH},
    "gpt2": {"num_key_value_heads": None, "head_dim": None},  # has no grouped heads
}


def tiny_tokenizer(size: int = TOKENIZER_SIZE, corpus: Sequence[str] = CORPUS) -> tokenizers.Tokenizer:
    """Byte-level BPE with `size` ids at most, special tokens first."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def tiny_checkpoint(path: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a Hugging Face folder with random weights to `path`; `changes` override the config. Returns `path`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    wanted = _SHAPE | _FAMILIES[family] | changes
    config = AutoConfig.for_model(family, **{name: value for name, value in wanted.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))
    return path


def tiny_bundle(path: Path, family: str = "llama", drafters: Sequence[str] = ("ngram",), **changes: Any) -> Path:
    """Export a tiny checkpoint to `path`; drafter "model" stands for the target as its own draft. Returns `path`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / f"tiny-{family}", family, **changes)
        wanted = tuple(f"model:{checkpoint}" if name == "model" else name for name in drafters)
        export_bundle(ExportOptions(model=str(checkpoint), output=path, drafters=wanted))
    return path


@functools.cache
def shared_checkpoint(family: str = "llama", seed: int = 0) -> Path:
    """A tiny checkpoint that all tests of a run share; do not change it (copy it first)."""
    return tiny_checkpoint(_session_folder() / f"{family}-{seed}", family, seed)


@functools.cache
def shared_bundle(family: str = "llama", drafters: tuple[str, ...] = ("ngram", "model")) -> Path:
    """A tiny bundle that all tests of a run share; do not change it (copy it first)."""
    return tiny_bundle(_session_folder() / f"bundle-{family}-{'-'.join(drafters)}", family, drafters)


@functools.cache
def _session_folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="specdec-tests-")
    _KEPT.append(holder)
    return Path(holder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed with the process

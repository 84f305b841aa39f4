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


def tiny_gguf(path: Path, seed: int = 0, splitter: str = "smollm", **metadata: Any) -> Path:
    """Write a llama GGUF (float32, tied, the tiny tokenizer) to `path`; `metadata`: more keys, `__` for a dot."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(seed)
    layers, hidden, inner, heads, kv_heads, head = 2, 48, 96, 4, 2, 16
    state = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(MAX_LENGTH)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}[type(value)]
        add(key.replace("__", "."), value)

    def put(name: str, *shape: int, scale: float = 0.2) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    put("token_embd.weight", len(tokens), hidden)
    put("output_norm.weight", hidden, scale=1.0)
    for layer in range(layers):
        put(f"blk.{layer}.attn_norm.weight", hidden, scale=1.0)
        put(f"blk.{layer}.ffn_norm.weight", hidden, scale=1.0)
        put(f"blk.{layer}.attn_q.weight", heads * head, hidden)
        put(f"blk.{layer}.attn_k.weight", kv_heads * head, hidden)
        put(f"blk.{layer}.attn_v.weight", kv_heads * head, hidden)
        put(f"blk.{layer}.attn_output.weight", hidden, heads * head)
        put(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        put(f"blk.{layer}.ffn_up.weight", inner, hidden)
        put(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_bundle(path: Path, family: str = "llama", drafters: Sequence[str] = ("ngram",), **changes: Any) -> Path:
    """Export a tiny checkpoint to `path`; drafter "model" stands for the target as its own draft. Returns `path`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / f"tiny-{family}", family, **changes)
        wanted = tuple(f"model:{checkpoint}" if name == "model" else name for name in drafters)
        export_bundle(ExportOptions(model=str(checkpoint), output=path, drafters=wanted))
    return path


def far_bundle() -> Path:
    """A tiny bundle that all tests of a run share, whose draft model knows nothing of its target."""
    return _far_bundle()


def quantized_bundle(precision: str) -> Path:
    """A tiny bundle at `precision` that all tests of a run share; its draft, in int4, knows little of its target."""
    return _quantized_bundle(precision)


def shared_checkpoint(family: str = "llama", seed: int = 0) -> Path:
    """A tiny checkpoint that all tests of a run share; do not change it (copy it first)."""
    return _checkpoint(family, seed)


def shared_bundle(family: str = "llama", drafters: tuple[str, ...] = ("ngram", "model")) -> Path:
    """A tiny bundle that all tests of a run share; do not change it (copy it first)."""
    return _bundle(family, drafters)


@functools.cache
def _checkpoint(family: str, seed: int) -> Path:
    return tiny_checkpoint(session_folder() / f"{family}-{seed}", family, seed)


@functools.cache
def _bundle(family: str, drafters: tuple[str, ...]) -> Path:
    return tiny_bundle(session_folder() / f"bundle-{family}-{'-'.join(drafters)}", family, drafters)


@functools.cache
def _far_bundle() -> Path:
    options = ExportOptions(
        model=str(shared_checkpoint()),
        output=session_folder() / "bundle-far",
        drafters=("ngram", f"model:{shared_checkpoint(seed=9)}"),
    )
    export_bundle(options)
    return options.output


@functools.cache
def blocks_checkpoint(seed: int = 0) -> Path:
    """A tiny llama that all tests of a run share, of whole blocks of 32, in part of 64: every precision takes it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    return tiny_checkpoint(session_folder() / f"blocks-{seed}", seed=seed, **sizes)


@functools.cache
def _quantized_bundle(precision: str) -> Path:
    options = ExportOptions(
        model=str(blocks_checkpoint()),
        output=session_folder() / f"bundle-{precision}",
        drafters=("ngram", f"model:{blocks_checkpoint(9)}", "layerskip:1"),
        precision=precision,
        draft_precision="int4",
    )
    export_bundle(options)
    return options.output


@functools.cache
def session_folder() -> Path:
    """A folder that is removed with the process."""
    holder = tempfile.TemporaryDirectory(prefix="specdec-tests-")
    _KEPT.append(holder)
    return Path(holder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed with the process

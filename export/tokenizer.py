"""A checkpoint's tokenizer → `tokenizer.json`, `chat_template.jinja`, `generation_config.json` and their record.

`tokenizer.json` is copied byte for byte where the checkpoint has one, else converted once (a GGUF's conversion is
cached by the file's SHA-256: Gemma's takes long). What the configuration promises about BOS is checked against what the
file does. This module knows nothing of weights and graphs, and of no second tokenizer (`pair.py` compares two).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import pre_tokenizers, processors
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from specdec.engines import manifest
from specdec.engines.cache import cache_dir
from specdec.engines.errors import SourceError, UnsupportedModelError
from specdec.export.sources import Checkpoint

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
PROBE = "Héllo, wörld! 12345 {x} 你好\n\n  two"

# GGUF pre-tokenizers of byte-level vocabularies, beside those that transformers has a table for. transformers takes any
# other for GPT-2's; llama.cpp splits the digits of the second group one by one first.
_LIKE_GPT2 = frozenset({"gpt-2", "default", "phi-2", "olmo", "mpt", "jais"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_CONVERSION = "2"  # part of the cache key: raise it when the conversion changes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as the bundle stores it. `vocab_size` is its highest id + 1."""

    json: bytes
    chat_template: str | None
    generation_config: dict[str, Any]
    record: manifest.Tokenizer
    vocab_size: int

    def write(self, folder: Path) -> None:
        """Write `tokenizer.json`, `generation_config.json` and, where there is one, `chat_template.jinja`."""
        (folder / "tokenizer.json").write_bytes(self.json)
        (folder / "generation_config.json").write_text(json.dumps(self.generation_config, indent=2) + "\n", "utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, "utf-8")

    def backend(self) -> tokenizers.Tokenizer:
        """Parse the tokenizer (a second for a large vocabulary)."""
        return tokenizers.Tokenizer.from_buffer(self.json)


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """Read or convert the tokenizer of `checkpoint`.

    Raises `SourceError` when there is none, it is broken, or it does not decode what it encodes, and
    `UnsupportedModelError` for a GGUF whose splitting of text is not known.
    """
    config = checkpoint.read_json("tokenizer_config.json")
    raw, converted = _tokenizer_json(checkpoint)
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as exc:  # the tokenizers library raises bare Exception
        raise SourceError(f"the tokenizer of {checkpoint.path} is damaged: {exc}") from exc
    special = _special_tokens(checkpoint, config, backend)
    add_bos = checkpoint.metadata.get("tokenizer.ggml.add_bos_token", config.get("add_bos_token"))
    if _unlimit(backend) | _set_bos(backend, special.get("bos_token"), add_bos) or converted:
        raw = (backend.to_str(pretty=False) + "\n").encode()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise SourceError(f"the tokenizer of {checkpoint.path} is empty")
    _check_round_trip(checkpoint, backend)
    template = _chat_template(checkpoint, config)
    generation = checkpoint.generation_config()
    record = manifest.Tokenizer(
        special_tokens=special,
        eos_token_ids=_eos_ids(checkpoint, generation, special, vocabulary),
        has_chat_template=template is not None,
    )
    return TokenizerFiles(
        json=raw,
        chat_template=template,
        generation_config=generation,
        record=record,
        vocab_size=max(vocabulary.values()) + 1,
    )


def _tokenizer_json(checkpoint: Checkpoint) -> tuple[bytes, bool]:
    """Bytes of `tokenizer.json`, and whether they were converted rather than copied."""
    if checkpoint.format == "gguf":
        return _cached_gguf_conversion(checkpoint), True
    own = checkpoint.path / "tokenizer.json"
    return (own.read_bytes(), False) if own.is_file() else (_convert(checkpoint), True)


def _cached_gguf_conversion(checkpoint: Checkpoint) -> bytes:
    splitter = checkpoint.metadata.get("tokenizer.ggml.pre", "default")
    known = _LIKE_GPT2 | _SINGLE_DIGITS | set(GGUF_PRE_TOKENIZER_SPLITS)
    if checkpoint.metadata.get("tokenizer.ggml.model") == "gpt2" and splitter not in known:
        raise UnsupportedModelError(
            f"{checkpoint.path} splits text by {splitter!r}, which its conversion does not know: "
            "use the original checkpoint"
        )
    with checkpoint.path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    version = f"{_CONVERSION}-{transformers.__version__}"
    cached = cache_dir() / "tokenizers" / f"{digest}-{version}.json"
    if cached.is_file():
        return cached.read_bytes()
    raw = _convert(checkpoint)
    partial = cached.with_suffix(f".{os.getpid()}.partial")
    with suppress(OSError):  # a read-only or full home: the next export converts again
        cached.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(raw)
            partial.replace(cached)
        finally:
            partial.unlink(missing_ok=True)
    return raw


def _convert(checkpoint: Checkpoint) -> bytes:
    """Let transformers build the fast tokenizer (from sentencepiece files, vocab and merges, or GGUF metadata)."""
    folder = checkpoint.path
    options: dict[str, Any] = {"trust_remote_code": checkpoint.trust_remote_code}
    if checkpoint.format == "gguf":
        folder, options = checkpoint.path.parent, {"gguf_file": checkpoint.path.name}
    try:
        fast = transformers.AutoTokenizer.from_pretrained(str(folder), config=checkpoint.config, **options)
        backend: tokenizers.Tokenizer = fast.backend_tokenizer
    except Exception as exc:  # transformers raises what it meets: OSError, ValueError, ImportError, AttributeError
        line = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise SourceError(
            f"{checkpoint.path} has no tokenizer that can be converted to tokenizer.json: {line}"
        ) from exc
    if checkpoint.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return backend.to_str(pretty=False).encode()


def _unlimit(backend: tokenizers.Tokenizer) -> bool:
    """Drop truncation and padding left over from training, which would silently cut prompts; return whether any was."""
    limited = backend.truncation is not None or backend.padding is not None
    backend.no_truncation()
    backend.no_padding()
    return limited


def _set_bos(backend: tokenizers.Tokenizer, bos: str | None, wanted: object) -> bool:
    """Make the post-processor add BOS, or not, as the configuration says; return whether it had to change."""
    bos_id = backend.token_to_id(bos) if bos is not None else None
    if wanted is None or bos_id is None:
        return False
    ids = backend.encode("a", add_special_tokens=True).ids
    if (ids[:1] == [bos_id]) == bool(wanted):
        return False
    if wanted:
        template = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    else:
        template = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    backend.post_processor = template
    return True


def _special_tokens(checkpoint: Checkpoint, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Special tokens by name, from the first place that has them: config, map file, then ids of the model's config."""
    mapped = checkpoint.read_json("special_tokens_map.json")
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name) or mapped.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if token is None:
            ggml = {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}.get(name, f"{name}_id")
            number = checkpoint.metadata.get(f"tokenizer.ggml.{ggml}", getattr(checkpoint.config, f"{name}_id", None))
            number = number[0] if isinstance(number, list) and number else number
            token = backend.id_to_token(number) if isinstance(number, int) and number >= 0 else None
        if token is not None:
            found[name] = str(token)
    return found


def _eos_ids(
    checkpoint: Checkpoint, generation: Mapping[str, Any], special: Mapping[str, str], vocabulary: Mapping[str, int]
) -> list[int]:
    """Ids that end a text: the union of what generation config, model config, GGUF and tokenizer name."""
    ids: set[int] = set()
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [checkpoint.metadata.get(f"tokenizer.ggml.{name}") for name in ends]
    for value in (generation.get("eos_token_id"), getattr(checkpoint.config, "eos_token_id", None), *named):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = vocabulary.get(special.get("eos_token", ""))
    if eos is not None:
        ids.add(eos)
    return sorted(ids)


def _chat_template(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """The checkpoint's chat template; of several named ones, the one called "default"."""
    own = checkpoint.path / "chat_template.jinja"
    if checkpoint.format == "safetensors" and own.is_file():
        return own.read_text("utf-8")
    template = config.get("chat_template", checkpoint.metadata.get("tokenizer.chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise SourceError(f"the chat template of {checkpoint.path} is neither text nor a list of named templates")
    return template


def _check_round_trip(checkpoint: Checkpoint, backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer that loses text; normalizers may change spaces, case and composition, nothing else."""
    ids = backend.encode(PROBE, add_special_tokens=False).ids
    unknown = getattr(backend.model, "unk_token", None)
    if not ids:
        raise UnsupportedModelError(f"the tokenizer of {checkpoint.path} encodes text to nothing")
    if unknown is not None and backend.token_to_id(unknown) in ids:
        return  # a vocabulary without byte fallback may not know every character of the probe
    decoded = backend.decode(ids, skip_special_tokens=False)
    if _letters(decoded) != _letters(PROBE):
        raise SourceError(f"the tokenizer of {checkpoint.path} decodes {PROBE!r} to {decoded!r}")


def _letters(text: str) -> str:
    return re.sub(r"\s", "", text).casefold()

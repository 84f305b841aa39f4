"""What single tokens stand for: bytes. A token may be part of a character, so not every one is a text of its own.

This module knows vocabularies; texts are `text.py`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """Bytes of a tokenizer's tokens, as its decoder writes them: byte-level, or words with a byte fallback."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = set(_kinds(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder else set()
        self._of_letter = _byte_letters() if "ByteLevel" in kinds else {}
        self._spaced = bool(kinds & {"Metaspace", "Replace"})

    def __getitem__(self, token: int) -> bytes:
        """Bytes of a token, those of special ones included; empty for ids that the tokenizer does not have."""
        piece = self._tokenizer.id_to_token(token) or ""
        if self._of_letter:
            return b"".join(self._of_letter.get(letter) or letter.encode() for letter in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return (piece.replace("▁", " ") if self._spaced else piece).encode()


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_letters() -> dict[str, bytes]:
    """The letter for each byte in byte-level vocabularies (GPT-2's): Latin-1's own, or the next ones from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): bytes([byte]) for byte in shown} | {chr(256 + i): bytes([b]) for i, b in enumerate(hidden)}

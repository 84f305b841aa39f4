"""What tells one conversation from another, however many turns it has: the beginning that its requests share.

This module knows the shape of requests, as far as their beginnings go; it checks nothing, and refuses nothing.
"""

import hashlib

import msgspec

from specdec.runtime.prefixes import LEAST

# Of a prompt, which has no turns. Caches of shorter beginnings are not kept: a token has four characters or so.
PROMPT_BYTES = 4 * LEAST


class _Turn(msgspec.Struct):
    role: str
    content: msgspec.Raw


class _Body(msgspec.Struct):
    messages: list[_Turn] = []
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Body)


def conversation_key(body: bytes) -> str:
    """A hash that all turns of a chat have, and few others: of what comes before its first answer.

    Of a completion: the first bytes of its prompt. Empty for what is neither.
    """
    try:
        request = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    beginning = bytes(request.prompt)[:PROMPT_BYTES]
    for turn in request.messages:
        if turn.role == "assistant":
            break
        beginning += turn.role.encode() + b"\0" + bytes(turn.content) + b"\0"
    return hashlib.sha256(beginning).hexdigest()[:16] if beginning else ""

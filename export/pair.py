"""Can this draft speak for this target? Compares two tokenizers by content, id by id.

Draft tokens are fed to the target as ids, so an id must mean the same string on both sides. Vocabularies may be padded
to different sizes and one may be a prefix of the other; below the smaller size they must agree. This module knows
nothing of weights, and does not mind a draft whose context is shorter: its `ModelSpec.max_length` records that.
"""

from specdec.engines.errors import PairError
from specdec.export.tokenizer import TokenizerFiles

SHOWN = 5  # differing ids that a message lists
MIN_SHARED = 0.5  # of the target's ids: below, most of what the target says cannot be drafted


def check_pair(target: TokenizerFiles, draft: TokenizerFiles) -> int:
    """Return how many ids, from 0 up, mean the same in both tokenizers.

    Raises `PairError` when a shared id, a special token or an end token differs, or too few ids are shared.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    ours = _strings(target)
    theirs = ours if target.json == draft.json else _strings(draft)
    if differing := [token for token in range(shared) if ours.get(token) != theirs.get(token)]:
        shown = ", ".join(f"{token}: {ours.get(token)!r} / {theirs.get(token)!r}" for token in differing[:SHOWN])
        raise PairError(
            f"target and draft differ in {len(differing)} of {shared} shared token ids (target / draft): {shown}"
        )
    if shared < MIN_SHARED * target.vocab_size:
        raise PairError(
            f"the draft knows {draft.vocab_size} token ids and the target {target.vocab_size}: too few to draft"
        )
    _check_ends(target, draft, shared)
    _check_special(target, draft)
    return shared


def _strings(files: TokenizerFiles) -> dict[int, str]:
    """Raw token strings by id: what the vocabulary holds, not what decoding makes of it."""
    return {token: text for text, token in files.backend().get_vocab(with_added_tokens=True).items()}


def _check_ends(target: TokenizerFiles, draft: TokenizerFiles, shared: int) -> None:
    """Both must have an end in common; a chat model may know one more than the base model that drafts for it."""
    ours, theirs = ({token for token in files.record.eos_token_ids if token < shared} for files in (target, draft))
    if ours and theirs and not ours & theirs:
        raise PairError(f"the target ends a text with token ids {sorted(ours)}, the draft with {sorted(theirs)}")


def _check_special(target: TokenizerFiles, draft: TokenizerFiles) -> None:
    """BOS begins both contexts, so both must name the same one; other roles are the target's business alone."""
    ours, theirs = (files.record.special_tokens.get("bos_token") for files in (target, draft))
    if ours is not None and theirs is not None and ours != theirs:
        raise PairError(f"the target begins a text with {ours!r}, the draft with {theirs!r}")

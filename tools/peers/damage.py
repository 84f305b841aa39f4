"""What a peer's model has lost against the same weights in fp32: its logits beside an engine's, on the same texts.

Which engine that is, and how much loss is too much, is not known here.
"""

from collections.abc import Sequence

from specdec.engines.base import Engine
from specdec.engines.damage import Damage, Tally, teacher_forced
from specdec.engines.errors import RequestError
from specdec.tools.peers.process import Peer


def peer_damage(
    peers: Sequence[Peer], reference: Engine, texts: Sequence[Sequence[int]], width: int
) -> list[Damage | None]:
    """Damage of each peer on `texts` (token ids), of which `reference` is given `width` tokens at a time.

    None: the peer gives no logits. Raises `RequestError` for a peer whose vocabulary is smaller than that of
    `reference`, and when no text has two tokens.
    """
    size, tallies = reference.spec.vocab_size, [Tally() for _ in peers]
    silent: set[int] = set()
    for tokens in texts:
        if len(tokens) < 2 or not peers:
            continue
        scores = [None if at in silent else peer.score(tokens[:-1]) for at, peer in enumerate(peers)]
        silent |= {at for at, logits in enumerate(scores) if logits is None}
        for peer, logits in zip(peers, scores, strict=True):
            if logits is not None and logits.shape[1] < size:
                raise RequestError(f"{peer.model} has a vocabulary of {logits.shape[1]}, the reference one of {size}: "
                                   "compare the same model")  # fmt: skip
        at = 0
        for following, expected in teacher_forced(reference, tokens, width):
            for tally, logits in zip(tallies, scores, strict=True):
                if logits is not None:
                    tally.add(expected, logits[at : at + len(following), :size], following)
            at += len(following)
    return [None if at in silent else tally.damage for at, tally in enumerate(tallies)]

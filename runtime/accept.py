"""Who is accepted, and what the target emits. Pure: a tree, distributions and dice in, a path and a token out.

p(node) [V] is the target's distribution after `node` (ROOT: after the pending token), and tree.q[node] [V] the one that
the node's token was drawn from, both after the request's whole pipeline. Rules ask for p only where it can matter, and
do not know where p and q come from, nor caches, nor text. docs/lossless.md has the mathematics.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.engines.contract import FloatArray
from specdec.runtime.chance import Dice
from specdec.runtime.tree import ROOT, TokenTree

Target = Callable[[int], FloatArray]  # node -> p [V]


class Accepted(NamedTuple):
    """The draft nodes of `path` are kept, from the first level down; then `token` is emitted from the target."""

    path: tuple[int, ...]
    token: int


def accept_matching(tree: TokenTree, choice: Callable[[int], int]) -> Accepted:
    """Keep what the target would have chosen itself; choice(node) is the token that it chooses after `node`.

    Greedy decoding (choice: the argmax; blockwise decoding, Stern et al., arXiv:1811.03115) and coupled sampling
    (choice: argmax of log p + noise of the position): the text is the target's own whatever the draft.
    """
    path: list[int] = []
    node: int | None = ROOT
    while node is not None:
        token = choice(node)
        node = next((child for child in tree.children(node) if tree.tokens[child] == token), None)
        if node is not None:
            path.append(node)
    return Accepted(tuple(path), token)


def accept_tokens(tree: TokenTree, p: Target, dice: Dice) -> Accepted:
    """Token rejection sampling (Leviathan et al., arXiv:2211.17192, algorithm 1), child after child down a tree.

    Siblings were drawn without replacement from one q, in their order, or are deterministic (q is one-hot).
    """
    path: list[int] = []
    node = ROOT
    while True:
        target, draft = p(node), None
        for child in tree.children(node):
            token, q = tree.tokens[child], tree.draft(child)
            if q is not None and draft is not None:
                q = draft  # what its siblings have left of it
            # q[token] > 0, since token was drawn from it
            if dice.coin(target[token] if q is None else target[token] / q[token]):
                path.append(child)
                node = child
                break
            if q is None:
                rest = _without(target, token)
            else:
                rest = np.maximum(target - q, 0)
                draft = _normalized(_without(q, token))
            # nothing is left only if p and q are equal; then the coin cannot lose but by rounding
            target = _normalized(rest) if rest.any() else target
        else:
            return Accepted(tuple(path), dice.draw(target))


def accept_block(tree: TokenTree, p: Target, dice: Dice) -> Accepted:
    """Block verification of a sampled chain (Sun et al., arXiv:2403.10444, algorithm 2): never fewer than by token.

    weight is p_i of the paper; the longest prefix whose coin wins is kept, not the one before the first loss.
    """
    weight, kept, rest = 1, 0, np.maximum(p(ROOT) - _draft(tree, 0), 0)
    for index, token in enumerate(tree.tokens):
        weight = min(1, weight * p(index - 1)[token] / _draft(tree, index)[token])
        if weight == 0:
            break  # what follows an impossible token is impossible
        last = index + 1 == len(tree)
        left = p(index) if last else np.maximum(weight * p(index) - _draft(tree, index + 1), 0)
        mass = left.sum()
        chance = weight if last or mass + 1 == weight else mass / (mass + 1 - weight)  # 1 where it is 0 / 0
        if dice.coin(chance):
            kept, rest = index + 1, left
    return Accepted(tuple(range(kept)), dice.draw(rest if rest.any() else p(kept - 1)))


def accept_typical(tree: TokenTree, p: Target, dice: Dice, epsilon: float = 0.09, delta: float = 0.3) -> Accepted:
    """LOSSY. Typical acceptance (Cai et al., arXiv:2401.10774, section 2.3.1): the longest path of likely tokens.

    A token is likely when p(token) > min(epsilon, delta * exp(-entropy of p)). What is emitted is not distributed as p.
    """
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}  # of the nodes that are likely, like all their ancestors
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent in paths:
            target = p(parent)
            positive = target[target > 0]
            if target[token] > min(epsilon, delta * np.exp((positive * np.log(positive)).sum())):
                paths[node] = (*paths[parent], node)
    path = max(paths.values(), key=len)
    return Accepted(path, dice.draw(p(path[-1] if path else ROOT)))


def _draft(tree: TokenTree, node: int) -> FloatArray:
    q = tree.draft(node)
    if q is None:
        raise ValueError("block verification is for sampled chains: this one is deterministic")
    return q


def _without(weights: FloatArray, token: int) -> FloatArray:
    rest = weights.copy()
    rest[token] = 0
    return rest


def _normalized(weights: FloatArray) -> FloatArray:
    total = weights.sum()
    return weights / total if total > 0 else weights

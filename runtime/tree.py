"""Proposals as token trees.

A proposal hangs below the *pending* token, the last one that was emitted, which is not in the cache yet. A chain is
the tree with one branch. This module knows tokens, parents and positions: no probabilities of the target, no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.engines.chunk import RowInput, nodes_to
from specdec.engines.contract import FloatArray

ROOT = -1  # the parent of the first level: the pending token


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Proposed tokens of one row, every node after its parent.

    parents[i] is the index of node i's parent, ROOT for the pending token. q[i] [V] is the distribution that node i's
    token was drawn from (siblings: one after another without replacement, in their order); q[i] None says that it was
    chosen deterministically, and q None says so of all. `linear`: its drafter makes chains only, whatever it draws.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[FloatArray | None, ...] | None = None
    linear: bool = False

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or (self.q is not None and len(self.q) != len(self.tokens)):
            raise ValueError("a tree has one parent, and one q or none, for each token")
        if not all(ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"a parent comes before its children: {self.parents}")

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Sequence[FloatArray] | None = None) -> "TokenTree":
        """Return the tree of a drafter that makes chains only."""
        parents = tuple(range(-1, len(tokens) - 1))
        return cls(tuple(tokens), parents, None if q is None else tuple(q), linear=True)

    @classmethod
    def merge(cls, chains: Sequence[Sequence[int]], limit: int) -> "TokenTree":
        """Return the deterministic tree of all chains, beginnings shared, the first chain first; at most `limit` nodes.

        A later chain that does not fit is cut.
        """
        nodes: dict[tuple[int, ...], int] = {(): ROOT}  # path of tokens -> node
        for chain in chains:
            for depth in range(1, len(chain) + 1):
                if len(nodes) <= limit:
                    nodes.setdefault(tuple(chain[:depth]), len(nodes) - 1)
        paths = [path for path in nodes if path]
        made = cls(tuple(path[-1] for path in paths), tuple(nodes[path[:-1]] for path in paths))
        return made.first_branch_first()

    @property
    def depth(self) -> int:
        """Tokens on the longest branch."""
        depths = {ROOT: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        return max(depths.values())

    def first_branch_first(self) -> "TokenTree":
        """Return the same tree depth first, so that the first branch is contiguous: nodes 0, 1, 2, ..."""
        order: list[int] = []
        stack = self.children(ROOT)[::-1]
        while stack:
            order.append(stack.pop())
            stack += self.children(order[-1])[::-1]
        place = {node: index for index, node in enumerate(order)} | {ROOT: ROOT}
        return TokenTree(
            tuple(self.tokens[node] for node in order),
            tuple(place[self.parents[node]] for node in order),
            None if self.q is None else tuple(self.q[node] for node in order),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node has the one before it as parent."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def is_sampled(self) -> bool:
        """Whether there are tokens and every one was drawn from a distribution."""
        return bool(self.q) and all(q is not None for q in self.q or ())

    def children(self, node: int) -> list[int]:
        """Children of `node` (or ROOT) in the order in which they were drawn."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def draft(self, node: int) -> FloatArray | None:
        """The distribution [V] that `node`'s token was drawn from, None for a deterministic one."""
        return None if self.q is None else self.q[node]

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the first level down to `node`; none for ROOT."""
        return tuple(nodes_to(self.parents, node))

    def text(self, node: int) -> list[int]:
        """Tokens from the first level down to `node`."""
        return [self.tokens[step] for step in self.path(node)]

    def verify(self, pending: int) -> RowInput:
        """Return what the target is fed to score `pending` and every node."""
        parents = None if self.is_chain else (-1, *(parent + 1 for parent in self.parents))
        return RowInput((pending, *self.tokens), 1 + len(self), parents)

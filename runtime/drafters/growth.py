"""How a drafter that has a distribution after every node grows its tree, level by level.

A `Shape` says how many children each node gets: fixed (a chain, `medusa_choices`) or by confidence, to a node budget.
It may depend on the tokens drawn so far and on q, never on what is about to be drawn, and nothing that was drawn is
dropped: either would bias the output (docs/lossless.md). This module knows distributions and ranks: no model, no row.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from specdec.engines.chunk import nodes_to
from specdec.engines.contract import FloatArray
from specdec.engines.errors import RequestError
from specdec.runtime.sampling import most_probable
from specdec.runtime.tree import ROOT, TokenTree

Ranks = tuple[int, ...]  # a node by the ranks of its path: (0, 1) is the second child of the first child
_FLOOR = 0.05  # confidence, as a probability of being reached, below which a dynamic tree does not grow by default


class Shape(Protocol):
    """How many children nodes get. `linear`: one at most, whatever is drawn."""

    @property
    def linear(self) -> bool:
        """Whether trees of this shape are always chains."""
        ...

    def parents(self, level: Sequence[Ranks], confidence: Sequence[float], grown: int) -> list[int]:
        """Return the indices of the nodes of `level` that may get children; `grown` nodes are there already."""
        ...

    def counts(
        self, chosen: Sequence[Ranks], confidence: Sequence[float], q: Sequence[FloatArray], grown: int
    ) -> list[int]:
        """Return how many children each chosen node gets; q[i] [V] is the draft's distribution after node i."""
        ...


class StaticShape:
    """The same tree every time: `medusa_choices` (Cai et al., arXiv:2401.10774), a list of paths of ranks.

    `floor`: it ends early below nodes that are less confident, by the product of q along their path. Raises
    `RequestError` for a path whose parent or lower-ranked sibling is missing.
    """

    def __init__(self, choices: Sequence[Sequence[int]], floor: float = 0.0) -> None:
        paths = {tuple(path) for path in choices}
        for path in sorted(paths):
            *parent, rank = path or (-1,)
            lower = (*parent, rank - 1)
            if rank < 0 or (rank > 0 and lower not in paths) or (parent and tuple(parent) not in paths):
                raise RequestError(
                    f"the tree has the path {list(path)} without its parent or a sibling of lower rank: add it"
                )
        self.nodes, self.depth = len(paths), max(map(len, paths), default=0)
        self._floor = floor
        self._children: dict[Ranks, int] = {}
        for path in paths:
            self._children[path[:-1]] = max(self._children.get(path[:-1], 0), path[-1] + 1)
        self.linear = all(count == 1 for count in self._children.values())

    @classmethod
    def chain(cls, length: int, floor: float = 0.0) -> "StaticShape":
        """Return the shape of one branch."""
        return cls([(0,) * depth for depth in range(1, length + 1)], floor)

    def parents(self, level: Sequence[Ranks], confidence: Sequence[float], grown: int) -> list[int]:
        """See `Shape.parents`."""
        each = enumerate(zip(level, confidence, strict=True))
        return [index for index, (ranks, sure) in each if ranks in self._children and sure >= self._floor]

    def counts(
        self, chosen: Sequence[Ranks], confidence: Sequence[float], q: Sequence[FloatArray], grown: int
    ) -> list[int]:
        """See `Shape.counts`."""
        return [self._children[ranks] for ranks in chosen]


def choose_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """Paths of the tree of up to `nodes` nodes that keeps most tokens, if heads are right independently of each other.

    accuracies[d][r]: how often the candidate of rank r at depth d is right. A node is worth the product along its path,
    and the best one that hangs below the tree comes next (Cai et al., arXiv:2401.10774, appendix on sparse trees).
    """
    chosen: list[list[int]] = []
    reach: list[tuple[float, list[int]]] = [(-accuracies[0][0], [0])] if accuracies else []  # by worth, negated
    while reach and len(chosen) < nodes:
        worth, path = heapq.heappop(reach)
        chosen.append(path)
        *parent, rank = path
        ranks = accuracies[len(parent)]
        if rank + 1 < len(ranks):
            above = worth / ranks[rank] if ranks[rank] else 0.0
            heapq.heappush(reach, (above * ranks[rank + 1], [*parent, rank + 1]))
        if len(path) < len(accuracies):
            heapq.heappush(reach, (worth * accuracies[len(path)][0], [*path, 0]))
    return chosen


class DynamicShape:
    """Grows where the draft is confident, up to `nodes`; a level has about the square root of that.

    The confidence of a node is the product of q along its path; the r-th child of a node counts with the r-th largest
    entry of q there, whichever token is then drawn. After EAGLE-2 (Li et al., arXiv:2406.16858), which drops the least
    confident nodes at the end: that is lossless for deterministic children only, so here nothing is dropped.
    """

    linear = False

    def __init__(self, nodes: int, floor: float = _FLOOR) -> None:
        self.nodes, self._floor = nodes, floor
        self._width = max(1, round(nodes**0.5))

    def parents(self, level: Sequence[Ranks], confidence: Sequence[float], grown: int) -> list[int]:
        """See `Shape.parents`."""
        if grown >= self.nodes:
            return []
        return [index for index, value in enumerate(confidence) if value >= self._floor]

    def counts(
        self, chosen: Sequence[Ranks], confidence: Sequence[float], q: Sequence[FloatArray], grown: int
    ) -> list[int]:
        """See `Shape.counts`."""
        room = min(self._width, self.nodes - grown)
        candidates = [
            (-above * float(weights[token]), index)
            for index, (above, weights) in enumerate(zip(confidence, q, strict=True))
            for token in most_probable(weights, room)
        ]
        best = [index for value, index in sorted(candidates)[:room] if -value >= self._floor]
        return [best.count(index) for index in range(len(chosen))]


class GrowingTree:
    """One row's tree while it grows. Nodes are in order of their level.

    While `frontier` is not empty: find q after each of its nodes (ROOT is the pending token), then `extend`.
    `depth` and `nodes` limit what the shape asks for.
    """

    def __init__(self, shape: Shape, depth: int, nodes: int) -> None:
        self._shape, self._depth, self._nodes = shape, depth, nodes
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._q: list[FloatArray] = []
        self._ranks: list[Ranks] = []
        self._confidence: list[float] = []
        self._levels = 0
        self.frontier: list[int] = [ROOT] if min(depth, nodes) > 0 and shape.parents([()], [1.0], 0) else []

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def promise(self) -> float:
        """Chance, by the draft, that a node of the frontier is reached: what a further level can bring at most."""
        return sum(self._confidence[node] if node != ROOT else 1.0 for node in self.frontier)

    def extend(self, q: Sequence[FloatArray], choose: Callable[[FloatArray, int], Sequence[int]]) -> None:
        """Give the frontier's nodes children; q[i] [V] belongs to frontier[i] (all zero: no child is possible).

        choose(q, count) returns up to `count` different tokens, in their order.
        """
        ranks = [self._ranks[node] if node != ROOT else () for node in self.frontier]
        confidence = [self._confidence[node] if node != ROOT else 1.0 for node in self.frontier]
        counts = self._shape.counts(ranks, confidence, q, len(self))
        first = len(self)
        for node, above, sure, weights, count in zip(self.frontier, ranks, confidence, q, counts, strict=True):
            count = min(count, self._nodes - len(self))
            if count <= 0 or not weights.any():
                continue
            for rank, token in enumerate(choose(weights, count)):
                self.tokens.append(token)
                self.parents.append(node)
                self._q.append(weights)
                self._ranks.append((*above, rank))
                self._confidence.append(sure * float(weights[token]))
        self._levels += 1
        level = range(first, len(self))
        wanted: list[int] = []
        if level and self._levels < self._depth and len(self) < self._nodes:
            wanted = self._shape.parents(self._ranks[first:], self._confidence[first:], len(self))
        self.frontier = [level[index] for index in wanted]

    def tree(self, *, sampled: bool) -> TokenTree:
        """Return the proposal; `sampled`: the tokens were drawn from q, not chosen by rank."""
        q = tuple(self._q) if sampled else None
        made = TokenTree(tuple(self.tokens), tuple(self.parents), q, linear=self._shape.linear)
        return made if made.is_chain else made.first_branch_first()

    def text(self, node: int) -> list[int]:
        """Tokens from the first level down to `node`."""
        return [self.tokens[step] for step in nodes_to(self.parents, node)]

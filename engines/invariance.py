"""The invariance gate: are an engine's logits the same bits however a text is cut, batched and stored? And its noise.

The exporter runs the gate on every graph that it writes and the verifier repeats it where the bundle is used, so there
is neither torch nor a bundle here: only numpy, the `Engine` protocol and some tokens. Where bits do differ, the noise
functions say how far. What the right logits are is not known here: another gate compares them with PyTorch's.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from specdec.engines.base import Engine
from specdec.engines.chunk import RowInput, nodes_to, pack
from specdec.engines.contract import FloatArray, ModelSpec
from specdec.engines.errors import ExportError, GateError
from specdec.engines.manifest import Invariance
from specdec.engines.scoring import LEAST_WIDTH, same_bits, score

PROBE_TOKENS = 64  # length of the text that is scored over and over
CAPACITIES = (160, 224)  # slots of the short scorings
DEEP = 300  # tokens before the deep ones: kernels sum over the cache in blocks (of 128), whose borders must not show
THREADS = (2, 1, 4)  # 4, on any machine: kernels that share a sum among threads cut it elsewhere only then
NOISE_WIDTHS = (1, 2, 5, 16)  # one token, the narrowest pass of `exact`, a verified draft, a wide one

PROBE_TEXT = (
    "The lighthouse keeper wrote one line a day: wind from the north-west, 7 knots; two ships seen; all well. "
    "On the 31st of March he wrote nothing, and the next morning the lamp was still burning. What had he seen?\n"
    "def next_line(lines: list[str]) -> str:\n    return lines[-1] if lines else 'all well'\n"
)

Opener = Callable[[int], Engine]  # number of threads -> engine
T = TypeVar("T")


def probe_text(ids: Sequence[int], spec: ModelSpec, count: int = PROBE_TOKENS) -> list[int]:
    """`count` tokens: `ids` (a real text) without those that the model does not know, repeated as often as needed.

    Raises `ExportError` for a context that is too short to check anything.
    """
    if spec.max_length < count:
        raise ExportError(f"the model's context is {spec.max_length} tokens: the gates need {count}")
    known = [token for token in ids if token < spec.vocab_size] or [0]
    return [known[index % len(known)] for index in range(count)]


def probe_rows(tokens: Sequence[int]) -> list[Sequence[int]]:
    """Rows of different lengths, cut out of the first `PROBE_TOKENS` tokens: what is scored over and over."""
    return [tokens[start : PROBE_TOKENS - cut] for start, cut in ((0, 0), (3, 4), (7, 12), (1, 30))]


@dataclass(frozen=True, slots=True)
class Scoring:
    """One way to score: chunks of `widths` in turn, `batch` rows together, `slots` in the cache.

    `past`: widths of the chunks before, if the text is scored at the end of a longer one (`DEEP` tokens).
    """

    widths: tuple[int, ...]
    batch: int = 1
    slots: int = CAPACITIES[0]
    past: tuple[int, ...] = ()

    def __str__(self) -> str:
        behind = f" behind {sum(self.past)} tokens" if self.past else ""
        return f"chunks of {'/'.join(map(str, self.widths))}{behind}, batch {self.batch}, {self.slots} slots"

    def run(self, engine: Engine, rows: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Logits [len, V] of the first `batch` rows, in passes as narrow as the chunks are."""
        least = 1 if self.widths == (1,) else LEAST_WIDTH
        texts = [[*_before(row, sum(self.past)), *row] for row in rows[: self.batch]]
        return score(engine, engine.allocate(self.batch, self.slots), texts, self.widths, past=self.past, least=least)


_SMALL, _LARGE = CAPACITIES
_WHOLE = (PROBE_TOKENS,)
SCORINGS = (
    Scoring((2,)), Scoring((3,)), Scoring((5,)), Scoring((8,)), Scoring((1, 13, 4, 2, 21, 7)), Scoring((31, 33)),
    Scoring(_WHOLE, 1, _LARGE), Scoring((5,), 1, _LARGE), Scoring((3,), 2), Scoring(_WHOLE, 2, _LARGE),
    Scoring((2, 5, 8), 4), Scoring((16,), 4, _LARGE), Scoring((5, 2), 1, 3 * DEEP, (77, DEEP - 77)),
    Scoring((1,)), Scoring((1,), 4, _LARGE), Scoring((1,), 1, 2 * DEEP, (DEEP,)),
)  # fmt: skip
FEW_SCORINGS = (
    Scoring(_WHOLE), Scoring((3,)), Scoring((8,), 4, _LARGE), Scoring((3,), 1, 2 * DEEP, (DEEP,)), Scoring((1,)),
)  # fmt: skip


class Base:
    """Logits that every scoring is compared with: each row in one chunk, and the first one behind `DEEP` tokens."""

    def __init__(self, engine: Engine, rows: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self._short = [Scoring((len(row),)).run(engine, [row])[0] for row in rows]
        self._deep = Scoring((len(rows[0]),), 1, 2 * DEEP, (DEEP,)).run(engine, rows) if self.fits(engine) else []

    @staticmethod
    def fits(engine: Engine) -> bool:
        """Whether the model's context is long enough for the deep scorings."""
        return engine.spec.max_length >= DEEP + PROBE_TOKENS

    def logits(self, scoring: Scoring) -> list[FloatArray]:
        """What `scoring` has to give."""
        return self._deep if scoring.past else self._short[: scoring.batch]


def run_invariance(open_engine: Opener, tokens: Sequence[int], first: Callable[[Engine], T]) -> tuple[T, Invariance]:
    """Run the whole gate on `PROBE_TOKENS` or more tokens; return what `first` returned, and the gate's result.

    The engine is opened once per thread count, one at a time, and closed again. `first` is called before anything else
    with the first one, for whatever else needs an engine. Raises `GateError` that names the difference and where it is.
    """
    rows = probe_rows(tokens)
    with closing(open_engine(THREADS[0])) as engine:
        found = first(engine)
        base = Base(engine, rows)
        results = [check_invariance(engine, base, SCORINGS)]
    for threads in THREADS[1:]:
        with closing(open_engine(threads)) as engine:
            results.append(check_invariance(engine, base, FEW_SCORINGS, f"{threads} thread(s), "))
    return found, Invariance(
        exact=True,
        least_width=max(result.least_width for result in results),
        scorings=sum(result.scorings for result in results),
        one_token_max_abs_diff=max(result.one_token_max_abs_diff for result in results),
    )


def check_invariance(engine: Engine, base: Base, scorings: Sequence[Scoring] = SCORINGS, where: str = "") -> Invariance:
    """Score the base's rows in other ways and compare bit by bit; `where` says in messages which engine it is.

    Passes of one token may differ, then `least_width` is 2; any other difference raises `GateError`.
    """
    possible = [scoring for scoring in scorings if not scoring.past or base.fits(engine)]
    least_width: Literal[1, 2] = 1
    deviation = 0.0
    for scoring in possible:
        for row, (logits, expected) in enumerate(
            zip(scoring.run(engine, base.rows), base.logits(scoring), strict=True)
        ):
            if same_bits(logits, expected):
                continue
            if scoring.widths != (1,):
                raise GateError(
                    f"invariance gate failed: {_first_difference(logits, expected)} of row {row} in {where}{scoring}, "
                    "against the whole text in one chunk"
                )
            least_width, deviation = 2, max(deviation, _largest_difference(logits, expected))
    return Invariance(exact=True, least_width=least_width, scorings=len(possible), one_token_max_abs_diff=deviation)


@dataclass(frozen=True, slots=True)
class TreeNoise:
    """How far the logits of a tree's nodes are off those of the same paths decoded alone, as chains.

    The first branch (nodes 0, 1, .. as long as each one's parent is the one before) lies in the cache as a chain does:
    `first_branch_exact` says whether its bits are the chain's. All other nodes have slots before them that they must
    not see, and sums over a cache with such gaps are rounded elsewhere: `max_abs_diff` is the largest difference of a
    logit of these `nodes` nodes.
    """

    first_branch_exact: bool
    max_abs_diff: float
    nodes: int


def kernel_noise(engine: Engine, rows: Sequence[Sequence[int]]) -> float:
    """Largest difference between two logits of one token, each row scored in passes of `NOISE_WIDTHS` and in one pass.

    0.0 for an engine whose kernels do not depend on the width of a pass, NaN if a logit is. When two decodings of such
    an engine part at a position, then rounding alone explains it only if the gap between the two best logits is
    below twice this number (either of the two may move by as much). It is measured, not a bound.
    """
    spread = [0.0]
    for row in rows:
        slots = len(row) + max(*NOISE_WIDTHS, len(row))
        scored = (Scoring((width,), 1, slots).run(engine, [row])[0] for width in (*NOISE_WIDTHS, len(row)))
        low = high = next(scored)
        for logits in scored:
            low, high = np.minimum(low, logits), np.maximum(high, logits)
        spread.append(_largest_difference(low, high))
    return float(np.max(spread))


def tree_noise(engine: Engine, row: Sequence[int], *, trees: int = 8, nodes: int = 12, seed: int = 0) -> TreeNoise:
    """Score `trees` random trees of `nodes` words of `row`, each behind some beginning of `row`, and each path alone.

    `row` is some text of at most `max_length - nodes` tokens.
    """
    rng, longest = np.random.default_rng(seed), engine.spec.max_length
    kv = engine.allocate(1, len(row) + max(nodes, LEAST_WIDTH))
    engine.step(pack([RowInput(row, 0)], np.zeros(1, np.int64), LEAST_WIDTH, longest), kv)
    exact, differences, compared = True, [0.0], 0
    for past in np.sort(rng.integers(0, len(row) + 1, (trees, 1)), axis=0)[::-1]:  # each leaves what the next one needs
        tokens, parents = rng.choice(row, nodes).tolist(), _random_tree(rng, nodes)
        found = engine.step(pack([RowInput(tokens, nodes, parents)], past, LEAST_WIDTH, longest), kv)[0, :nodes].copy()
        alone = np.empty_like(found)
        for leaf in sorted(set(range(nodes)) - set(parents)):
            path = nodes_to(parents, leaf)
            chain = RowInput([tokens[node] for node in path], len(path))
            alone[path] = engine.step(pack([chain], past, LEAST_WIDTH, longest), kv)[0, : len(path)]
        fork = next((node for node, parent in enumerate(parents) if parent != node - 1), nodes)
        exact = exact and same_bits(found[:fork], alone[:fork])
        differences.append(_largest_difference(found[fork:], alone[fork:]))
        compared += nodes - fork
    return TreeNoise(first_branch_exact=exact, max_abs_diff=float(np.max(differences)), nodes=compared)


def _random_tree(rng: np.random.Generator, nodes: int) -> list[int]:
    """Parents of a tree in which every other node goes on where the one before it ends; several may be roots."""
    return [node - 1 if rng.random() < 0.5 else int(rng.integers(-1, node)) for node in range(nodes)]


def _before(row: Sequence[int], count: int) -> list[int]:
    """`count` tokens of another text of the same words."""
    return [row[(7 * index + index * index) % len(row)] for index in range(count)]


def _first_difference(left: FloatArray, right: FloatArray) -> str:
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    position, token = np.argwhere(left.view(unsigned) != right.view(unsigned))[0]
    largest = _largest_difference(left, right)
    return f"bits differ, first at position {position}, logit of token {token} (largest difference {largest:.3g})"


def _largest_difference(left: FloatArray, right: FloatArray) -> float:
    return float(np.abs(left.astype(np.float32) - right.astype(np.float32)).max(initial=0.0))

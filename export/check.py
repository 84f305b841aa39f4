"""The gates: is the exported graph the model that PyTorch has (parity), and are its logits the same bits however the
text is cut (invariance)? They run on the real weights at every export; a failed gate means no bundle.

Parity compares with logits that were computed before the graph was written, so PyTorch's weights are freed when the
engine loads. This module knows the `Engine` protocol, not a backend, and nothing of files.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from specdec.engines.base import Engine
from specdec.engines.contract import FloatArray, ModelSpec
from specdec.engines.errors import ExportError, GateError
from specdec.engines.manifest import Invariance, Parity
from specdec.export.scoring import LEAST_WIDTH, Round, TokenPath, same_bits, score, soil

PROBE_TOKENS = 64  # length of the text that is scored over and over
LONGEST_WINDOW = 1024  # a sliding window up to this is crossed by a real text; a longer one costs minutes
CAPACITIES = (160, 224)  # slots of the short scorings
DEEP = 300  # tokens before the deep ones: kernels sum over the cache in blocks (of 128), whose borders must not show
REFERENCE_BATCH = 8  # sequences of one PyTorch pass: its logits stay below 0.3 GB with the largest vocabularies
THREADS = (2, 1)

# Largest logit difference to PyTorch, by dtype: absolute, or relative to the largest |logit| of the probe, whichever is
# more. PyTorch's own float32 logits are 2e-6 of the largest one away from float64's (measured: SmolLM2-135M, peak 36,
# and Gemma 3 270M, peak 128), ONNX Runtime's 1.6e-6; the factor of five leaves room for other CPUs, while the smallest
# fault we could plant (one weight matrix 1 % off) is a thousand times larger. float16 resolves 5e-4 to 1e-3 of a logit.
ABSOLUTE = {"float32": 1e-4, "float16": 5e-2}
RELATIVE = {"float32": 1e-5, "float16": 5e-3}

TREE = (-1, 0, 1, 0, 3, 1)  # two branches below the root, the first one with a sibling leaf

Opener = Callable[[int], Engine]  # number of threads -> engine


@dataclass(frozen=True, slots=True)
class Reference:
    """PyTorch's logits [V] by token path, for the rounds that a graph will be asked to run."""

    rounds: tuple[Round, ...]
    long_round: tuple[Round, ...]
    logits: dict[TokenPath, FloatArray]


def probe_tokens(ids: Sequence[int], spec: ModelSpec, window: int | None) -> list[int]:
    """Tokens that the gates score: `ids` (a real text), repeated to the length that is needed.

    Long enough to cross a sliding window of up to `LONGEST_WINDOW`. Raises `ExportError` for a context that is too
    short to check anything.
    """
    if spec.max_length < PROBE_TOKENS:
        raise ExportError(f"the model's context is {spec.max_length} tokens: the gates need {PROBE_TOKENS}")
    known = [token for token in ids if token < spec.vocab_size] or [0]
    crossing = window is not None and window <= min(LONGEST_WINDOW, spec.max_length - PROBE_TOKENS)
    need = PROBE_TOKENS + (window if window is not None and crossing else 0)
    return [known[index % len(known)] for index in range(need)]


def reference(model: Any, tokens: Sequence[int], vocab_size: int) -> Reference:
    """Run the parity script with PyTorch: `model` is a causal language model of transformers, on the CPU."""
    rounds = _script(tokens, vocab_size)
    long_round = _beyond_window(tokens) if len(tokens) > PROBE_TOKENS else ()
    paths = {path for step in (*rounds, *long_round) for _, _, path in step.paths()}
    logits: dict[TokenPath, FloatArray] = {}
    for batch in _batches(paths):
        width = len(batch[0])  # the longest; the others are padded behind their end, which a causal model ignores
        wanted = {(row, length) for row, text in enumerate(batch) for length in _prefixes(text, paths)}
        keep = sorted({length - 1 for _, length in wanted})
        ids = torch.tensor([[*text, *text[-1:] * (width - len(text))] for text in batch])
        with torch.inference_mode():
            output = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(keep)).logits  # [B, keep, V]
        for row, length in wanted:
            logits[batch[row][:length]] = output[row, keep.index(length - 1)].float().numpy().copy()
    return Reference(rounds, long_round, logits)


def _batches(paths: Collection[TokenPath]) -> Iterator[list[TokenPath]]:
    """The paths that are no beginning of another one, longest first, a few to a batch."""
    begun = {path[:length] for path in paths for length in range(1, len(path))}
    whole = sorted(set(paths) - begun, key=lambda path: (-len(path), path))
    return (whole[start : start + REFERENCE_BATCH] for start in range(0, len(whole), REFERENCE_BATCH))


def _prefixes(text: TokenPath, paths: Collection[TokenPath]) -> list[int]:
    return [length for length in range(1, len(text) + 1) if text[:length] in paths]


def run_gates(open_engine: Opener, expected: Reference, tokens: Sequence[int]) -> tuple[Parity, Invariance]:
    """Run both gates; the engine is opened once per thread count and closed again.

    Raises `GateError` that names the gate, the difference and where it is.
    """
    rows = [tokens[start : PROBE_TOKENS - cut] for start, cut in ((0, 0), (3, 4), (7, 12), (1, 30))]
    first, second = THREADS
    with closing(open_engine(first)) as engine:
        parity = check_parity(engine, expected)
        base = Base(engine, rows)
        invariance = check_invariance(engine, base, SCORINGS)
    with closing(open_engine(second)) as engine:
        again = check_invariance(engine, base, FEW_SCORINGS, f"{second} thread(s), ")
    return parity, Invariance(
        exact=True,
        least_width=max(invariance.least_width, again.least_width),
        scorings=invariance.scorings + again.scorings,
        one_token_max_abs_diff=max(invariance.one_token_max_abs_diff, again.one_token_max_abs_diff),
    )


def check_parity(engine: Engine, expected: Reference) -> Parity:
    """Run the script on a soiled cache and compare every scored position with PyTorch's logits."""
    dtype = engine.spec.dtype
    peak = max(float(np.abs(logits).max()) for logits in expected.logits.values())
    if not np.isfinite(peak):
        raise GateError(f"parity gate failed: PyTorch's own logits are not finite in {dtype}: choose another precision")
    tolerance = max(ABSOLUTE[dtype], RELATIVE[dtype] * peak)
    worst, positions = 0.0, 0
    for rounds, rows in ((expected.rounds, 3), (expected.long_round, 1)):
        if not rounds:
            continue
        longest = max(len(past) + len(new) for step in rounds for past, new in zip(step.past, step.tokens, strict=True))
        kv = engine.allocate(rows, longest + PROBE_TOKENS)
        soil(engine, kv)
        for step in rounds:
            logits = engine.step(step.chunk(engine.spec.max_length), kv, step.first_row)  # [B, N, V]
            for row, index, path in step.paths():
                difference = np.abs(logits[row, index].astype(np.float32) - expected.logits[path])
                token = int(np.argmax(difference))  # of a NaN, if there is one
                error = float(difference[token])
                if not error <= tolerance:
                    where = f"case {step.name!r}, row {row}, position {len(path) - 1}, logit of token {token}"
                    raise GateError(
                        f"parity gate failed: {error:.3g} off PyTorch (tolerance {tolerance:.3g}) in {where}"
                    )
                worst, positions = max(worst, error), positions + 1
    return Parity(max_abs_error=worst, tolerance=tolerance, positions=positions)


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


def _before(row: Sequence[int], count: int) -> list[int]:
    """`count` tokens of another text of the same words."""
    return [row[(7 * index + index * index) % len(row)] for index in range(count)]


def _first_difference(left: FloatArray, right: FloatArray) -> str:
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    position, token = np.argwhere(left.view(unsigned) != right.view(unsigned))[0]
    largest = _largest_difference(left, right)
    return f"bits differ, first at position {position}, logit of token {token} (largest difference {largest:.3g})"


def _largest_difference(left: FloatArray, right: FloatArray) -> float:
    return float(np.abs(left.astype(np.float32) - right.astype(np.float32)).max())


def _script(tokens: Sequence[int], vocab_size: int) -> tuple[Round, ...]:
    """Prefill, decode, verify, tree, rollback, overwrite: three ragged rows; every round states its history in full."""
    rng = np.random.default_rng(1)
    texts = [tuple(tokens[start : start + PROBE_TOKENS - 8]) for start in (0, 5, 8)]
    lens = (11, 17, 23)

    def past(extra: int) -> tuple[TokenPath, ...]:
        return tuple(text[: length + extra] for text, length in zip(texts, lens, strict=True))

    def true(extra: int, count: int) -> tuple[TokenPath, ...]:
        return tuple(text[length + extra : length + extra + count] for text, length in zip(texts, lens, strict=True))

    def other(count: int) -> tuple[TokenPath, ...]:
        return tuple(tuple(rng.integers(0, vocab_size, count).tolist()) for _ in texts)

    def join(left: tuple[TokenPath, ...], right: tuple[TokenPath, ...]) -> tuple[TokenPath, ...]:
        return tuple((*a, *b) for a, b in zip(left, right, strict=True))

    lone = other(9)[1:2]
    return (
        Round(name="ragged prefill", past=((), (), ()), tokens=past(0), scored=2),
        Round(name="decode", past=past(0), tokens=join(true(0, 1), other(1)), scored=2),
        Round(name="verify", past=past(1), tokens=join(true(1, 3), other(2)), scored=5),
        Round(name="tree", past=past(4), tokens=join(true(4, 2), other(4)), parents=TREE, scored=6),
        Round(name="rollback", past=past(5), tokens=true(5, 4), scored=4),
        Round(name="overwrite", past=past(-5), tokens=other(6), scored=3),
        Round(name="one row refilled", past=((),), tokens=lone, scored=2, first_row=1),
        Round(name="its neighbours", past=(past(-5)[0], lone[0], past(-5)[2]), tokens=true(-5, 3), scored=2),
    )


def _beyond_window(tokens: Sequence[int]) -> tuple[Round, ...]:
    """One row, longer than the sliding window: the prompt up to the window's edge, then across it in small steps."""
    text = tuple(tokens)
    edge = len(text) - PROBE_TOKENS + 4  # just after the first position that no longer sees the start
    return (
        Round(name="prefill to the window", past=((),), tokens=(text[: edge - 16],), scored=2),
        Round(name="across the window", past=(text[: edge - 16],), tokens=(text[edge - 16 : edge + 8],), scored=24),
        Round(name="beyond the window", past=(text[: edge + 8],), tokens=(text[edge + 8 :],), scored=8),
    )

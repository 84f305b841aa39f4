"""The gates: is the exported graph the model that PyTorch has (parity), and are its logits the same bits however the
text is cut (invariance)? They run on the real weights at every export; a failed gate means no bundle.

Parity compares with logits that were computed before the graph was written, so PyTorch's weights are freed when the
engine loads. This module knows the `Engine` protocol, not a backend, and nothing of files.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.engines.base import Engine
from specdec.engines.contract import FloatArray, ModelSpec
from specdec.engines.errors import GateError, ResourceError
from specdec.engines.invariance import PROBE_TOKENS, Opener, probe_text, run_invariance
from specdec.engines.manifest import Invariance, Parity
from specdec.engines.scoring import Round, TokenPath, soil

LONGEST_WINDOW = 1024  # a sliding window up to this is crossed by a real text; a longer one costs minutes
REFERENCE_BATCH = 8  # sequences of one PyTorch pass: its logits stay below 0.3 GB with the largest vocabularies

# Largest logit difference to PyTorch, by dtype: absolute, or relative to the largest |logit| of the probe, whichever is
# more. PyTorch's own float32 logits are 2e-6 of the largest one away from float64's (measured: SmolLM2-135M, peak 36,
# and Gemma 3 270M, peak 128), ONNX Runtime's 1.6e-6; the factor of five leaves room for other CPUs, while the smallest
# fault we could plant (one weight matrix 1 % off) is a thousand times larger. float16 resolves 5e-4 to 1e-3 of a logit.
ABSOLUTE = {"float32": 1e-4, "float16": 5e-2}
RELATIVE = {"float32": 1e-5, "float16": 5e-3}

TREE = (-1, 0, 1, 0, 3, 1)  # two branches below the root, the first one with a sibling leaf


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
    crossing = window is not None and window <= min(LONGEST_WINDOW, spec.max_length - PROBE_TOKENS)
    return probe_text(ids, spec, PROBE_TOKENS + (window if window is not None and crossing else 0))


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


def reference_logits(
    model: Any, texts: Iterable[Sequence[int]], spec: ModelSpec, folder: Path
) -> list[tuple[list[int], FloatArray]]:
    """PyTorch's logits [L - 1, V] for each text of L tokens, in files of `folder` that are mapped, not read."""
    found: list[tuple[list[int], FloatArray]] = []
    for index, ids in enumerate(texts):
        tokens = [token for token in ids if token < spec.vocab_size]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1, : spec.vocab_size]
        file = folder / f"{index}.npy"
        try:
            np.save(file, logits.float().numpy())
        except OSError as exc:
            raise ResourceError(f"{folder} cannot hold the reference logits: {exc.strerror or exc}") from exc
        found.append((tokens, np.load(file, mmap_mode="r")))
    return found


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
    return run_invariance(open_engine, tokens, lambda engine: check_parity(engine, expected))


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
    near, past = max(edge - 16, 2), edge + 8  # a window may be shorter than what leads up to its edge
    return (
        Round(name="prefill to the window", past=((),), tokens=(text[:near],), scored=2),
        Round(name="across the window", past=(text[:near],), tokens=(text[near:past],), scored=past - near),
        Round(name="beyond the window", past=(text[:past],), tokens=(text[past:],), scored=8),
    )

"""End to end, through real graphs: what the runtime emits is distributed as the target alone would emit it.

The reference is the exact joint distribution of three tokens, from logits that the engine gives for every beginning,
without any code of drafting, acceptance or scheduling. Every case may fail by chance with probability `DELTA` at most.
"""

import itertools
import math
from collections import Counter
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from specdec.engines.base import Engine
from specdec.engines.registry import open_engine
from specdec.engines.scoring import score
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from specdec.runtime.grammar import GrammarCompiler
from specdec.runtime.sampling import LogitsPipeline
from support.bundles import far_bundle, quantized_bundle, shared_bundle
from support.eagles import eagle_bundle
from support.heads import medusa_bundle

DELTA = 1e-6
LENGTH = 3
PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
SAMPLES = 400
BATCH = 4
COMMON = {"max_new_tokens": LENGTH, "ignore_eos": True, "repetition_penalty": 1.3, "presence_penalty": 0.3}
# draft: bundle, method, and the request that makes draft and target as near or far as the name says
DRAFTS = {
    "ngram": (shared_bundle, "ngram", {"temperature": 0.6, "allowed_token_ids": (40, 41, 42, 43)}),
    "equal": (shared_bundle, "model", {"temperature": 1.0, "top_k": 4}),
    "far": (far_bundle, "model", {"temperature": 0.3, "allowed_token_ids": (5, 90, 150, 210)}),
    "disjoint": (far_bundle, "model", {"temperature": 0.7, "top_k": 3}),
    "int8": (partial(quantized_bundle, "int8"), "model", {"temperature": 0.5, "allowed_token_ids": (5, 90, 150, 210)}),
    "int4": (partial(quantized_bundle, "int4"), "model", {"temperature": 0.5, "allowed_token_ids": (5, 90, 150, 210)}),
    "skip": (
        partial(shared_bundle, drafters=("ngram", "layerskip:1")),
        "layerskip:1",
        {"temperature": 0.5, "allowed_token_ids": (5, 90, 150, 210)},
    ),
    "medusa": (medusa_bundle, "medusa", {"temperature": 0.7, "top_k": 4}),
    "eagle": (eagle_bundle, "eagle", {"temperature": 0.5, "allowed_token_ids": (5, 90, 91, 150)}),  # 90 is not drafted
}
TREES = {"chain": "chain", "dynamic": "dynamic", "static": [[0], [1], [0, 0], [0, 1], [1, 0]]}


@cache
def engine(bundle: Path) -> tuple[LLM, Engine]:
    llm = LLM(bundle, speculative=SpeculativeConfig(method=None))
    (variant,) = llm.manifest.target.variants.values()
    return llm, open_engine(bundle / variant.graph, llm.spec)


@cache
def exact_joint(bundle: Path, options: tuple) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `LENGTH` tokens that has one."""
    llm, scorer = engine(bundle)
    pipeline = LogitsPipeline(SamplingParams(**COMMON, **dict(options)), len(PROMPT))
    joint = {(): 1.0}
    for _ in range(LENGTH):
        grown: dict[tuple[int, ...], float] = {}
        for answer, mass in joint.items():
            text = [*PROMPT, *answer]
            (logits,) = score(scorer, scorer.allocate(1, 128), [text], [len(text)])
            p = pipeline.probabilities(logits[-1, : llm.spec.vocab_size], text)
            grown |= {(*answer, int(token)): mass * p[token] for token in np.flatnonzero(p)}
        joint = grown
    return joint


def check(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> None:
    """χ² (cells that expect fewer than 5 merged) and total variation against the exact distribution."""
    assert counts.keys() <= expected.keys(), "an impossible text"
    total = sum(counts.values())
    observed, ideal = np.array([(counts[text], total * p) for text, p in expected.items()]).T
    small = ideal < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        ideal = np.append(ideal[~small], ideal[small].sum())
    distance = np.abs(observed - ideal).sum() / 2 / total
    assert distance <= math.sqrt(len(ideal) / total) / 2 + math.sqrt(math.log(1 / DELTA) / (2 * total))
    assert chisquare(observed, ideal).pvalue > DELTA


def speculation(method: str, tree: str) -> SpeculativeConfig:
    """Chains of full length."""
    threshold = 0.0 if tree == "chain" else None
    return SpeculativeConfig(method=method, tree=TREES[tree], confidence_threshold=threshold)


def cases() -> list:
    found = []
    for draft, tree, rule, batch in itertools.product(DRAFTS, TREES, ("block", "token", "coupled"), (1, BATCH)):
        if tree == "static" and draft != "far":
            continue
        quick = {("far", "chain"), ("far", "dynamic"), ("ngram", "chain"), ("int8", "chain"), ("int4", "chain")}
        quick |= {("skip", "chain"), ("skip", "dynamic"), ("eagle", "chain"), ("eagle", "dynamic")}
        quick |= {("medusa", "dynamic")}
        fast = batch == BATCH and (draft, tree) in quick
        marks = () if fast else pytest.mark.slow
        found.append(pytest.param(draft, tree, rule, batch, marks=marks, id=f"{draft}-{tree}-{rule}-{batch}"))
    return found


@pytest.mark.parametrize(("draft", "tree", "rule", "batch"), cases())
def test_emitted_is_distributed_as_the_target(draft: str, tree: str, rule: str, batch: int) -> None:
    make_bundle, method, options = DRAFTS[draft]
    expected = exact_joint(make_bundle(), tuple(options.items()))
    counts: Counter[tuple[int, ...]] = Counter()
    proposed = accepted = 0
    with LLM(make_bundle(), speculative=speculation(method, tree), verify=False) as llm:
        for first in range(0, SAMPLES, batch):
            each = [SamplingParams(**COMMON, **options, acceptance=rule, seed=first + i) for i in range(batch)]
            for output in llm.generate([PROMPT] * batch, each):
                counts[output.token_ids] += 1
                proposed += output.stats.draft_tokens_proposed
                accepted += output.stats.draft_tokens_accepted
    check(counts, expected)
    total = sum(counts.values())
    # the case is what its name says: drafts are made, and accepted as they should be
    assert proposed >= total
    if draft == "equal" and tree == "chain":
        assert accepted == total * (LENGTH - 1)
    elif draft == "disjoint":
        assert accepted < proposed / 20
    else:
        assert 0 < accepted < proposed


CHOICES = ("the quick", "the slow", "then", "a", "add", "add(b", "def")


def exact_answers(bundle: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer of a grammar with finitely many, by plain constrained decoding."""
    llm, scorer = engine(bundle)
    ends = llm.manifest.tokenizer.eos_token_ids
    compiler = GrammarCompiler(bundle / "tokenizer.json", llm.spec.vocab_size, ends)
    pipeline = LogitsPipeline(params, len(PROMPT), grammar=compiler.matcher(params.structured_outputs))
    answers: dict[tuple[int, ...], float] = {}
    growing = [((), 1.0)]
    while growing:
        answer, mass = growing.pop()
        text = [*PROMPT, *answer]
        (logits,) = score(scorer, scorer.allocate(1, 128), [text], [len(text)])
        p = pipeline.probabilities(logits[-1, : llm.spec.vocab_size], text)
        for token in np.flatnonzero(p):
            longer = (*answer, int(token))
            if token in ends:
                answers[longer] = mass * p[token]
            else:
                growing.append((longer, mass * p[token]))
    return answers


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
@pytest.mark.parametrize(
    ("draft", "tree"), [("far", "chain"), ("far", "dynamic"), ("equal", "chain"), ("ngram", "chain")]
)
def test_structured_output_has_the_law_of_plain_constrained_decoding(draft: str, tree: str, rule: str) -> None:
    make_bundle, method, _ = DRAFTS[draft]
    form = StructuredOutputsParams(choice=CHOICES)
    options = {"temperature": 2.0, "max_new_tokens": 30, "structured_outputs": form, "repetition_penalty": 1.1}
    expected = exact_answers(make_bundle(), SamplingParams(**options))
    assert sum(expected.values()) == pytest.approx(1, abs=1e-9)
    assert len(expected) >= len(CHOICES)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    with LLM(make_bundle(), speculative=speculation(method, tree), verify=False) as llm:
        for first in range(0, SAMPLES, BATCH):
            each = [SamplingParams(**options, acceptance=rule, seed=first + i) for i in range(BATCH)]
            for output in llm.generate([PROMPT] * BATCH, each):
                assert output.text in CHOICES
                assert output.finish_reason == "stop"
                counts[output.token_ids] += 1
                accepted += output.stats.draft_tokens_accepted
    check(counts, expected)
    assert accepted > 0 or draft == "ngram"

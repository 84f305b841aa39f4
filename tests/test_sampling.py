"""The pipeline against transformers' processors, and the properties that acceptance relies on."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from specdec.engines.errors import DeadEndError, RequestError
from specdec.runtime.grammar import StructuredOutputsParams
from specdec.runtime.params import SamplingParams
from specdec.runtime.sampling import Grammar, LogitsPipeline, Logprob, most_probable, softmax

VOCAB = 3000


def logits(seed: int = 0, scale: float = 4.0, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def probabilities(values: np.ndarray, history: list[int], params: SamplingParams) -> np.ndarray:
    return LogitsPipeline(params, 0).probabilities(values, history)


def scores(values: np.ndarray, history: list[int], params: SamplingParams) -> np.ndarray:
    return LogitsPipeline(params, 0).scores(values, history)


def logprob(values: np.ndarray, history: list[int], params: SamplingParams, token: int) -> Logprob:
    return LogitsPipeline(params, 0).logprob(values, history, token)


PROMPT, END = 3, 7  # tokens of the history that are prompt; an end token


def whole_pipeline(params: SamplingParams, grammar: Grammar | None = None) -> LogitsPipeline:
    return LogitsPipeline(params, PROMPT, eos_token_ids=(END,), bad_words=params.bad_words, grammar=grammar)


def reference(
    values: np.ndarray, history: list[int], params: SamplingParams, permitted: list[int] | None = None
) -> np.ndarray:
    """The same terms through transformers, in the order of its `_get_logits_processor`."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as lp

    chain: list = []
    if params.logit_bias:
        chain.append(lp.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        chain.append(lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.frequency_penalty or params.presence_penalty:  # OpenAI's definition; transformers has none
        chain.append(lambda ids, scores: scores - penalties(history[PROMPT:], params))
    if params.bad_words:
        chain.append(lp.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_new_tokens:
        chain.append(lp.MinNewTokensLengthLogitsProcessor(PROMPT, params.min_new_tokens, END))
    for ids in (params.allowed_token_ids, permitted):
        if ids is not None:
            chain.append(lp.PrefixConstrainedLogitsProcessor(lambda batch, text, ids=ids: list(ids), 1))
    chain.append(lp.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(lp.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(lp.MinPLogitsWarper(params.min_p))
    ids, out = torch.tensor([history]), torch.tensor(values)[None].double()
    for term in chain:
        out = term(ids, out)
    return torch.softmax(out, -1)[0].numpy()


def penalties(generated: list[int], params: SamplingParams) -> Any:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with counts c of the answer."""
    import torch

    counts = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=VOCAB)
    return counts * params.frequency_penalty + (counts > 0) * params.presence_penalty


class Fixed:
    """A grammar that allows the same tokens everywhere."""

    def __init__(self, ids: list[int]) -> None:
        self.mask = np.isin(np.arange(VOCAB), ids)

    def allowed(self, generated: list[int]) -> np.ndarray:
        return self.mask

    def valid_prefix(self, generated: list[int], draft: list[int]) -> int:
        return next((i for i, token in enumerate(draft) if not self.mask[token]), len(draft))


def test_every_term_at_once_in_transformers_order() -> None:
    """Random subsets of the terms, random histories; with terms that only matter in this order."""
    rng = np.random.default_rng(0)
    seen: set[str] = set()
    for seed in range(300):
        values = logits(seed, scale=3.0)
        history = [int(token) for token in rng.choice(40, PROMPT + int(rng.integers(0, 12)))]
        permitted = [int(token) for token in rng.choice(VOCAB, 2000, replace=False)] + [*range(40)]
        top = [int(token) for token in np.argsort(-values)[:30]]
        options: dict[str, Any] = {
            "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4, "top_k": 40, "top_p": 0.9,
            "min_p": 0.02, "min_new_tokens": 6, "logit_bias": {top[3]: 4.0, history[0]: 5.0, END: 9.0},
            "bad_words": ((top[0],), (history[-1], top[1]), (top[2], top[1])), "allowed_token_ids": (*top, *range(40)),
        }  # fmt: skip
        options = {name: value for name, value in options.items() if rng.random() < 0.6}
        seen |= set(options)
        grammar = Fixed(permitted) if rng.random() < 0.5 else None
        params = SamplingParams(temperature=0.8, **options)
        expected = reference(values, history, params, permitted if grammar else None)
        got = whole_pipeline(params, grammar).probabilities(values, history)
        assert (got > 0).sum() == (expected > 0).sum(), options
        np.testing.assert_allclose(got, expected, atol=3e-6, err_msg=str(options))
    assert len(seen) == 10


def test_penalties_of_the_answer_count_the_answer_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    values = np.zeros(8, np.float32)
    got = whole_pipeline(params).scores(values, [1, 1, 2, 2, 3, 3, 3])  # the answer: 2, 3, 3, 3
    assert got.tolist() == [0, 0, -0.75, -1.25, 0, 0, 0, 0]
    assert whole_pipeline(params).scores(values, [1, 1, 2]).tolist() == [0] * 8


def test_bad_words_wait_for_their_beginning() -> None:
    params = SamplingParams(bad_words=((4, 5, 6), (2,)))
    scored = {tuple(history): whole_pipeline(params).scores(np.zeros(8, np.float32), history)
              for history in ([1, 1, 1], [1, 4, 5], [1, 1, 1, 5], [4, 5, 4, 5], [4, 5, 6])}  # fmt: skip
    assert {history: np.flatnonzero(np.isneginf(values)).tolist() for history, values in scored.items()} == {
        (1, 1, 1): [2], (1, 4, 5): [2, 6], (1, 1, 1, 5): [2], (4, 5, 4, 5): [2, 6], (4, 5, 6): [2],
    }  # fmt: skip


def test_no_end_before_the_minimum() -> None:
    params = SamplingParams(min_new_tokens=2)
    values = np.zeros(8, np.float32)
    values[END] = 9
    best = [whole_pipeline(params).best(values, [1] * length) for length in (3, 4, 5, 6)]
    assert best == [0, 0, END, END]


def test_a_grammar_is_asked_for_the_answer_alone() -> None:
    asked: list[list[int]] = []

    class Asked(Fixed):
        def allowed(self, generated: list[int]) -> np.ndarray:
            asked.append(list(generated))
            return self.mask

    pipeline = whole_pipeline(SamplingParams(temperature=1.0), Asked([5, 6]))
    p = pipeline.probabilities(logits(), [1, 2, 3, 5, 6, 5])
    assert asked == [[5, 6, 5]]
    assert np.flatnonzero(p).tolist() == [5, 6]


def test_terms_that_forbid_everything_are_an_error() -> None:
    params = SamplingParams(allowed_token_ids=(5, 6), bad_words=((5,),), logit_bias={5: 100.0})
    assert whole_pipeline(params).best(logits(), [0] * 4) == 6
    with pytest.raises(DeadEndError, match="no token is possible after 1 generated ones"):
        whole_pipeline(params, Fixed([5, 7])).scores(logits(), [0] * 4)


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"allowed_token_ids": (2,)}])
def test_one_token_support(options: dict[str, Any], temperature: float) -> None:
    values = logits(5)
    p = probabilities(values, [], SamplingParams(temperature=temperature, **options))
    expected = 2 if "allowed_token_ids" in options else int(values.argmax())
    assert p[expected] == 1
    assert p.sum() == 1


def test_extreme_temperatures() -> None:
    values = logits(6)
    cold = probabilities(values, [], SamplingParams(temperature=1e-6))
    assert cold[values.argmax()] == 1
    hot = probabilities(values, [], SamplingParams(temperature=100.0, top_p=1.0))
    assert (hot > 0).all()
    assert hot.max() < 2 / VOCAB
    tied = probabilities(np.array([1.0, 5.0, 5.0], np.float32), [], SamplingParams(temperature=1e-6))
    assert tied.tolist() == [0, 0.5, 0.5]


GRID = [
    dict(zip(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), values, strict=True))
    for values in itertools.product((0.3, 1.0, 1.7), (0, 1, 20), (0.3, 0.95, 1.0), (0.0, 0.05), (1.0, 1.3))
]


@pytest.mark.parametrize("bias", [{}, {5: 3.0, 17: -20.0}], ids=["", "bias"])
def test_matches_transformers(bias: dict[int, float]) -> None:
    history = [5, 9, 9, 2000]
    for seed, options in enumerate(GRID):
        params = SamplingParams(logit_bias=bias, **options)
        values = logits(seed)
        expected = reference(values, history, params)
        got = probabilities(values, history, params)
        assert (got > 0).sum() == (expected > 0).sum(), options
        np.testing.assert_allclose(got, expected, atol=2e-6, err_msg=str(options))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0, 20.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(scale: float, top_p: float) -> None:
    for size in (1, 2, 7, 700, VOCAB):
        values = logits(size, scale, size).round(1)  # with equal ones, which rank by id
        whole = probabilities(values, [], SamplingParams(temperature=1.0))
        order = np.argsort(-whole, kind="stable")
        count = next((n for n in range(1, size) if whole[order[:n]].cumsum()[-1] >= top_p), size)
        kept = np.flatnonzero(probabilities(values, [], SamplingParams(temperature=1.0, top_p=top_p)))
        assert sorted(order[:count]) == list(kept)


def test_flat_distribution_needs_every_candidate_for_top_p() -> None:
    p = probabilities(np.zeros(4096, np.float32), [], SamplingParams(temperature=1.0, top_p=0.75))
    assert (p > 0).sum() == 3072


def test_every_distribution_sums_to_one_and_keeps_the_argmax() -> None:
    for seed, options in enumerate(GRID):
        values = logits(seed)
        p = probabilities(values, [1, 2], SamplingParams(**options))
        assert p.sum() == pytest.approx(1, abs=1e-12)
        assert p[scores(values, [1, 2], SamplingParams(**options)).argmax()] == p.max()


def test_greedy_is_one_hot_at_the_first_maximum() -> None:
    p = probabilities(np.array([0, 3, 3, 1], np.float32), [], SamplingParams())
    assert p.tolist() == [0, 1, 0, 0]


def test_tiny_temperature_does_not_divide_to_nan() -> None:
    p = probabilities(logits(), [], SamplingParams(temperature=1e-300))
    assert p[logits().argmax()] == 1


def test_masked_ids_are_impossible() -> None:
    values = logits()
    values[100:] = -np.inf
    p = probabilities(values, [], SamplingParams(temperature=2.0, top_p=0.999))
    assert p[100:].sum() == 0
    assert p.sum() == pytest.approx(1)


def test_penalty_sees_each_token_once_and_lowers_both_signs() -> None:
    values = np.array([2.0, -2.0, 1.0], np.float32)
    out = scores(values, [0, 0, 1], SamplingParams(repetition_penalty=2.0))
    assert out.tolist() == [1.0, -4.0, 1.0]
    assert values.tolist() == [2.0, -2.0, 1.0]


def test_logprob_is_of_the_sampled_distribution() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, logprobs=2)
    values = logits(1)
    p = probabilities(values, [], params)
    token = int(most_probable(p, 3)[2])
    got = logprob(values, [], params, token)
    assert got.logprob == np.log(p[token])
    assert [i for i, _ in got.top] == most_probable(p, 2).tolist()
    assert got.top[0][1] == np.log(p.max())


def test_greedy_logprob_is_at_temperature_one() -> None:
    values = logits(2)
    got = logprob(values, [], SamplingParams(logprobs=1), int(values.argmax()))
    assert got.logprob == np.log(softmax(values).max()) < 0
    assert got.top == ((int(values.argmax()), got.logprob),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": 1e39}, "temperature must be 0 .* at most 1e6"),
        ({"stop": (1,)}, "stop must be a tuple"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": -0.1}, "top_p must be between 0"),
        ({"top_p": 1.5}, "top_p must be between 0"),
        ({"min_new_tokens": -1}, "min_new_tokens must be 0 or more"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"min_new_tokens must be at most max_new_tokens \(8\), not 9"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be between"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number"),
        ({"logit_bias": [5]}, "logit_bias must be a mapping"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must map token ids to numbers"),
        ({"bad_words": "word"}, "bad_words must be a tuple"),
        ({"bad_words": ("",)}, "bad_words must be a tuple"),
        ({"bad_words": ((),)}, "bad_words must be a tuple"),
        ({"bad_words": ((1.5,),)}, "bad_words must be a tuple"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must be a tuple of token ids, not empty"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids must be a tuple"),
        ({"acceptance": "typical"}, "acceptance must be one of block, token, coupled, lossy-typical, not 'typical'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"structured_outputs": "regex"}, "structured_outputs must be StructuredOutputsParams"),
        (
            {"ignore_eos": True, "structured_outputs": StructuredOutputsParams(regex="a")},
            "ignore_eos must be False with structured_outputs",
        ),
        ({"min_p": 2.0}, "min_p must be between"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias must be between"),
        ({"logit_bias": {1: 1e39}}, "logit_bias must be between"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty must be between"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ({"top_k": True}, "top_k must be a whole number, not True"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"seed": 1.0}, "seed must be a whole number"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"stop": ("",)}, "stop must be"),
        ({"stop": "text"}, "stop must be a tuple"),
        ({"logprobs": -1}, "logprobs must be 0 or more"),
    ],
)
def test_invalid_parameters_are_refused(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_parameters_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias names token 9, outside the vocabulary of 8"):
        SamplingParams(logit_bias={9: 1.0}).check_vocabulary(8)
    with pytest.raises(RequestError, match="allowed_token_ids names token 8, outside"):
        SamplingParams(allowed_token_ids=(1, 8)).check_vocabulary(8)
    with pytest.raises(RequestError, match="bad_words names token -1, outside"):
        SamplingParams(bad_words=("text", (1, -1))).check_vocabulary(8)
    with pytest.raises(RequestError, match="logprobs 9 exceeds"):
        SamplingParams(logprobs=9).check_vocabulary(8)


def test_parameters_belong_to_the_request() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias, temperature=Fraction(1, 2))
    bias[6] = 2.0
    assert params.logit_bias == {5: 1.0}
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1.0}, temperature=0.5))
    assert probabilities(logits(), [], params).argmax() == logits().argmax()


@pytest.mark.parametrize("count", [1, 3, 7])
def test_most_probable_of_few_positive_entries(count: int) -> None:
    p = np.zeros(VOCAB)
    p[[7, 2000, 30, 8]] = [0.2, 0.4, 0.2, 0.2]
    assert most_probable(p, count).tolist() == [2000, 7, 8, 30, 0, 1, 2][:count]
    assert most_probable(-p, 1).tolist() == [0]


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)

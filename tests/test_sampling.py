"""The pipeline against transformers' processors, and the properties that acceptance relies on."""

import itertools

import numpy as np
import pytest

from specdec.engines.errors import RequestError
from specdec.runtime.sampling import SamplingParams, logprob, most_probable, probabilities, scores, softmax

VOCAB = 3000  # more than the candidates that top-p sorts first


def logits(seed: int = 0, scale: float = 4.0, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def reference(values: np.ndarray, history: list[int], params: SamplingParams) -> np.ndarray:
    """The same terms through transformers."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as lp

    chain: list = []
    if params.logit_bias:
        chain.append(lp.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        chain.append(lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
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
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
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
    with pytest.raises(RequestError, match="logprobs 9 exceeds"):
        SamplingParams(logprobs=9).check_vocabulary(8)


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)

"""The round, on an engine that raises when a stale, foreign or padded slot is read."""

import itertools

import numpy as np
import pytest

from specdec.engines.base import Capabilities
from specdec.engines.chunk import RowInput
from specdec.engines.errors import EngineError, RequestError
from specdec.runtime.drafters.growth import StaticShape
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.sampling import LogitsPipeline
from support.drafters import KINDS, VOCAB, drafter_of, target
from support.fake_engine import FakeEngine, FakeKV, fake_spec
from support.rows import WatchedModel, greedy, make_row, make_scheduler, run

PROMPTS = [[1, 2, 3, 1, 2], [5], [7, 7, 7, 7, 7, 7, 7, 0], [4, 3]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_is_the_targets_own_text(kind: str, penalty: float) -> None:
    for prompt in PROMPTS:
        row = make_row(prompt, max_new_tokens=20, repetition_penalty=penalty)
        got = run(make_scheduler(target(), drafter_of(kind)), row)[0]
        assert got == greedy(target(), prompt, 20, repetition_penalty=penalty)
        assert row.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_rows", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_each_row_what_it_gets_alone(kind: str, max_rows: int, temperature: float) -> None:
    """Ragged prompts and lengths: rows join late, leave early and change places."""

    def rows() -> list:
        return [
            make_row(prompt, max_new_tokens=count, temperature=temperature, seed=i)
            for i, (prompt, count) in enumerate(zip(PROMPTS * 2, (3, 20, 7, 1, 12, 2, 9, 16), strict=True))
        ]

    alone = [run(make_scheduler(target(), drafter_of(kind)), row)[0] for row in rows()]
    assert run(make_scheduler(target(), drafter_of(kind, max_rows=max_rows), max_rows=max_rows), *rows()) == alone


@pytest.mark.parametrize("kind", ["self", "layers"])
def test_the_target_as_its_own_draft_is_accepted_to_the_last_token(kind: str) -> None:
    row = make_row([1, 2, 3], max_new_tokens=17)
    run(make_scheduler(target(), drafter_of(kind)), row)
    assert row.stats.rounds == 5  # 4 + 4 + 4 + 4 + 1
    assert row.stats.draft_tokens_accepted == row.stats.draft_tokens_proposed == 12
    assert row.stats.bonus_tokens == 5
    assert row.stats.mean_accepted_length == 17 / 5


def test_one_target_pass_a_round_and_never_one_position() -> None:
    engine = target()
    row = make_row([1, 2, 3, 4], max_new_tokens=10)
    run(make_scheduler(engine, drafter_of("other")), row)
    assert len(engine.widths) == 1 + row.stats.rounds  # the prompt's pass, then one a round
    assert min(engine.widths) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_counts_add_up(kind: str) -> None:
    row = make_row([1, 2, 1, 2, 1], max_new_tokens=23)
    run(make_scheduler(target(), drafter_of(kind)), row)
    stats = row.stats
    assert stats.new_tokens == 23 == stats.draft_tokens_accepted + stats.bonus_tokens
    assert stats.bonus_tokens <= stats.rounds
    assert stats.draft_tokens_accepted <= stats.draft_tokens_proposed
    assert stats.prompt_tokens == 5
    if kind == "plain":
        assert (stats.rounds, stats.draft_tokens_proposed) == (23, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [62, 63])
def test_the_end_of_the_context_narrows_the_draft(kind: str, length: int) -> None:
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, length - 5)]
    row = make_row(prompt, max_length=64, max_new_tokens=1000)
    got = run(make_scheduler(target(), drafter_of(kind)), row)[0]
    assert len(prompt) + len(got) == 64
    assert got == greedy(target(), prompt, 64 - len(prompt))
    assert row.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_leaves_one_slot(kind: str) -> None:
    prompt = [1] * 63
    assert run(make_scheduler(target(), drafter_of(kind)), make_row(prompt)) == [greedy(target(), prompt, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_inside_an_accepted_block_ends_the_text(kind: str) -> None:
    whole = greedy(target(), [1, 2, 3], 20)
    eos = whole[9]
    row = make_row([1, 2, 3], eos=(eos,), max_new_tokens=20)
    got = run(make_scheduler(target(), drafter_of(kind, num_tokens=6)), row)[0]
    assert got == whole[: whole.index(eos) + 1]
    assert row.finish_reason == "stop"
    assert row.stats.new_tokens == len(got)
    ignored = make_row([1, 2, 3], eos=(eos,), max_new_tokens=20, ignore_eos=True)
    assert run(make_scheduler(target(), drafter_of(kind)), ignored)[0] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_inside_an_accepted_block_ends_the_text(kind: str) -> None:
    whole = greedy(target(), [1, 2, 3], 20)
    text = "".join(chr(97 + token) for token in whole)
    stop = text[7:10]  # spans three tokens
    end = text.index(stop)
    row = make_row([1, 2, 3], stop=(stop,), max_new_tokens=20)
    got = run(make_scheduler(target(), drafter_of(kind, num_tokens=6)), row)[0]
    assert row.stream.text == text[:end]
    assert got == whole[: end + 3]
    assert row.finish_reason == "stop"


SAMPLED = [
    *("ngram", "other", "other tree", "other dynamic", "skip", "skip dynamic", "adaptive other"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("self", "narrow", "ngram tree", "other top")),
]


@pytest.mark.parametrize("acceptance", ["block", "token", "coupled"])
@pytest.mark.parametrize("kind", SAMPLED)
def test_sampled_text_is_distributed_as_the_targets(kind: str, acceptance: str) -> None:
    """χ² of the first three sampled tokens against the exact joint distribution; draft and target in the loop."""
    from scipy.stats import chisquare

    engine = target(4, sharpness=1.0)
    params = {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2, "max_new_tokens": 3}
    expected = joint(engine, [1, 2, 1], 3, **params)
    counts = dict.fromkeys(expected, 0)
    samples = 2000
    for seed in range(0, samples, 50):
        drafter = drafter_of(kind, num_tokens=2, max_rows=50, vocab=4, sharpness=1.0)
        rows = [make_row([1, 2, 1], seed=seed + i, acceptance=acceptance, **params) for i in range(50)]
        for tokens in run(make_scheduler(engine, drafter, max_rows=50), *rows):
            counts[tuple(tokens)] += 1
    observed = np.array([counts[key] for key in expected], float)
    ideal = np.array(list(expected.values())) * samples
    large = ideal >= 5
    observed = np.append(observed[large], observed[~large].sum())
    ideal = np.append(ideal[large], ideal[~large].sum())
    assert chisquare(observed, ideal).pvalue > 1e-4


def joint(engine: FakeEngine, prompt: list[int], depth: int, **params: float) -> dict[tuple[int, ...], float]:
    """Exact joint distribution of plain sampling."""
    from specdec.runtime.params import SamplingParams

    pipeline = LogitsPipeline(SamplingParams(**params), len(prompt))
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        out = {
            (*block, token): mass * p
            for block, mass in out.items()
            for token, p in enumerate(pipeline.probabilities(engine.logits_after([*prompt, *block]), [*prompt, *block]))
        }
    return out


def test_logprobs_are_the_same_with_and_without_speculation() -> None:
    def logprobs(kind: str, temperature: float) -> list:
        options = {"temperature": temperature, "seed": 3, "top_k": 5, "acceptance": "coupled"}
        row = make_row([1, 2, 3], max_new_tokens=15, logprobs=3, **options)
        run(make_scheduler(target(), drafter_of(kind)), row)
        assert [entry.token_id for entry in row.logprobs] == row.tokens[3:]
        return row.logprobs

    for temperature in (0.0, 1.0):
        expected = logprobs("plain", temperature)
        assert all(logprobs(kind, temperature) == expected for kind in KINDS)
        assert all(entry.logprob <= 0 for entry in expected)


def test_a_seed_repeats_the_text() -> None:
    def text(seed: int, kind: str) -> list[int]:
        row = make_row([1, 2, 3], max_new_tokens=15, temperature=1.0, seed=seed)
        return run(make_scheduler(target(), drafter_of(kind)), row)[0]

    for kind in ("plain", "ngram", "other"):
        assert text(1, kind) == text(1, kind) != text(2, kind)


def test_logits_wider_than_the_vocabulary_are_never_emitted() -> None:
    engine = FakeEngine(fake_spec(4, logits_size=40), order=1, sharpness=0.1, min_width=2)
    for temperature in (0.0, 5.0):
        row = make_row([1, 2, 3], max_new_tokens=40, temperature=temperature, seed=0)
        assert max(run(make_scheduler(engine, drafter_of("ngram")), row)[0]) < 4


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_coupled_seed_gives_one_text_whatever_drafts(temperature: float) -> None:
    """Every drafter, draft length and form of tree, alone and in a batch."""

    def texts(kind: str, num_tokens: int, max_rows: int) -> list[list[int]]:
        options = {"max_new_tokens": 20, "temperature": temperature, "repetition_penalty": 1.2, "acceptance": "coupled"}
        rows = [make_row(prompt, seed=i, **options) for i, prompt in enumerate(PROMPTS)]
        return run(make_scheduler(target(), drafter_of(kind, num_tokens=num_tokens), max_rows=max_rows), *rows)

    expected = texts("plain", 1, 1)
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    for kind in KINDS:
        for num_tokens in (1, 3, 6):
            assert texts(kind, num_tokens, 1) == texts(kind, num_tokens, 4) == expected, (kind, num_tokens)


def test_a_coupled_draft_of_the_target_itself_is_always_accepted() -> None:
    row = make_row([1, 2, 3], max_new_tokens=17, temperature=1.0, seed=0, acceptance="coupled")
    run(make_scheduler(target(), drafter_of("self")), row)
    assert row.stats.draft_tokens_accepted == row.stats.draft_tokens_proposed == 12


def test_trees_accept_more_than_chains_of_the_same_draft() -> None:
    def accepted(kind: str) -> int:
        rows = [make_row([1, 2, i % 8], max_new_tokens=30, temperature=1.0, seed=i) for i in range(40)]
        run(make_scheduler(target(), drafter_of(kind, max_rows=40), max_rows=40), *rows)
        return sum(row.stats.draft_tokens_accepted for row in rows)

    assert accepted("other tree") > accepted("other") > 0
    assert accepted("other dynamic") > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("engine", ["target", "draft"])
def test_logits_that_are_no_numbers_are_an_error_that_names_the_engine(engine: str, value: float) -> None:
    class Broken(FakeEngine):
        def logits_after(self, tokens: list[int]) -> np.ndarray:
            logits = super().logits_after(tokens)
            logits[3] = value if len(tokens) > 6 else logits[3]
            return logits

    good, bad = target(), Broken(fake_spec(VOCAB), order=None, capabilities=Capabilities(device="broken chip"))
    draft = WatchedModel(bad if engine == "draft" else target(), max_rows=1, min_width=2)
    drafter = ModelDrafter(draft, StaticShape.chain(2), VOCAB, VOCAB)
    row = make_row([1, 2, 3], max_new_tokens=20)
    with pytest.raises(EngineError, match="broken chip returned logits that are not numbers, in row 0 after"):
        run(make_scheduler(bad if engine == "target" else good, drafter), row)
    assert len(row.tokens) <= 7


def test_a_logit_of_minus_infinity_is_an_impossible_token() -> None:
    class Partial(FakeEngine):
        def logits_after(self, tokens: list[int]) -> np.ndarray:
            logits = super().logits_after(tokens)
            logits[2:] = -np.inf
            return logits

    engine = Partial(fake_spec(VOCAB), order=2, min_width=2)
    for kind in KINDS:
        row = make_row([5, 2, 3], max_new_tokens=30, temperature=2.0, seed=1)
        assert set(run(make_scheduler(engine, drafter_of(kind)), row)[0]) <= {0, 1}


def test_lossy_acceptance_says_so_in_its_statistics() -> None:
    row = make_row([1, 2, 3], max_new_tokens=20, temperature=1.0, seed=1, acceptance="lossy-typical")
    run(make_scheduler(target(), drafter_of("other tree")), row)
    assert len(row.tokens) == 23
    assert row.stats.as_dict()["acceptance"] == "lossy-typical"
    assert row.stats.as_dict()["lossless"] is False
    assert make_row([1], acceptance="lossy-typical").stats.lossless, "greedy is greedy"


@pytest.mark.parametrize("kind", KINDS)
def test_terms_of_the_request_hold_along_every_draft(kind: str) -> None:
    """Two-token bad words, allowed ids and a minimum length, with an end token that the model likes."""
    options = {"min_new_tokens": 9, "max_new_tokens": 25, "temperature": 1.5, "allowed_token_ids": (0, 1, 2, 3, 7)}
    for seed in range(20):
        row = make_row([1, 2, 3], eos=(7,), bad_words=((1, 2), (3,)), seed=seed, **options)
        got = run(make_scheduler(target(), drafter_of(kind)), row)[0]
        assert len(got) >= 10 or row.finish_reason == "length"
        assert 7 not in got[:9]
        assert set(got) <= {0, 1, 2, 7}
        assert (1, 2) not in itertools.pairwise(got)


def test_a_request_that_forbids_everything_is_told_so() -> None:
    row = make_row([1, 2, 3], allowed_token_ids=(4,), bad_words=((4,),), temperature=1.0)
    with pytest.raises(RequestError, match="no token is possible after 0 generated ones: bad_words"):
        run(make_scheduler(target(), drafter_of("other")), row)


def cached(max_rows: int = 2) -> WatchedModel:
    """A model with one row of three committed tokens and one pass behind it: [5], padded to two positions."""
    model = WatchedModel(target(), max_rows=max_rows, min_width=2)
    model.add_row()
    model.prefill(0, [1, 2, 3])
    model.step([RowInput([5], 1)])
    return model


def test_committing_padding_is_noticed() -> None:
    model = cached()
    model.commit(0, range(2))
    with pytest.raises(AssertionError, match="row 0 attends padding at 4 of 5"):
        model.step([RowInput([6], 1)])


def test_committing_what_was_never_written_is_noticed() -> None:
    model = cached()
    model.commit(0, range(3))
    with pytest.raises(AssertionError, match="row 0 attends"):
        model.step([RowInput([6], 1)])


def test_committing_what_was_rolled_back_is_noticed() -> None:
    model = cached()
    model.step([RowInput([5, 6, 7], 3)])
    model.step([RowInput([5], 1)])  # 6 and 7 are rolled back
    model.commit(0, range(3))
    with pytest.raises(AssertionError, match=r"row 0 attends (padding|a stale slot)"):
        model.step([RowInput([6], 1)])


def test_a_row_that_is_not_moved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row([1, 2, 3], max_new_tokens=2), make_row([4, 5, 6, 7], max_new_tokens=20)]
    monkeypatch.setattr(FakeKV, "move_row", lambda *_: None)
    with pytest.raises(AssertionError, match=r"row 0 attends (padding|a stale slot)"):
        run(make_scheduler(target()), *rows)


def test_a_row_that_the_draft_never_held_may_take_another_place() -> None:
    """The second prompt is longer than the draft's context: its draft row has no memory when the first one ends."""
    rows = [make_row([1, 2, 3], max_new_tokens=1), make_row([1] * 13, max_new_tokens=9)]
    got = run(make_scheduler(target(), drafter_of("short")), *rows)
    assert got == [greedy(target(), [1, 2, 3], 1), greedy(target(), [1] * 13, 9)]

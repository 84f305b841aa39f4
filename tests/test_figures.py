"""What runs add up to, on numbers that are exact in binary."""

from typing import Any

import pytest

from specdec.runtime.request import Round
from specdec.tools.figures import Answer, Costs, Run, Share, align, baseline, pick, summarize
from specdec.tools.intervals import Percentiles


def run(method: str, unit: int, seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), **more: Any) -> Run:
    """A run of one answer; without `history`, a round for each token, a millisecond apart."""
    history = more.pop("history", tuple(Round(0, 0, float(at)) for at in range(1, len(tokens) + 1)))
    fields = {"decoded": len(tokens), "history": history} | more
    batch = fields.pop("batch_size", 1)
    answer = Answer(question_id=unit, token_ids=tokens, **fields)
    category = {1: "rag", 2: "writing"}[unit]
    return Run(method=method, batch_size=batch, unit=unit, category=category, seconds=seconds, answers=(answer,))


DRAFTED = (Round(2, 1, 2.0), Round(1, 1, 4.0))
RUNS = [
    run("plain-fast", 1, 1.0, host_ms=2.0, target_ms=6.0),
    run("plain", 1, 2.0),
    run(
        "ngram",
        1,
        0.5,
        history=DRAFTED,
        draft_tokens_proposed=3,
        draft_tokens_accepted=2,
        bonus_tokens=2,
        target_ms=2.0,
        host_ms=2.0,
        draft_ms=4.0,
        ttft_ms=9.0,
        queue_ms=1.0,
    ),
    run("ort-genai", 1, 2.0, decoded=3, history=()),
    run("plain-fast", 2, 1.0, (1, 2)),
    run("plain", 2, 1.0, (1, 2)),
    run("ngram", 2, 1.0, (1, 2), history=(Round(0, 0, 1.0), Round(1, 0, 3.0)), draft_tokens_proposed=1),
    run("ort-genai", 2, 1.0, (1, 3), decoded=1, history=()),
]


def test_groups_are_all_copy_heavy_and_each_category_by_batch_size() -> None:
    figures = summarize([*RUNS, run("plain", 1, 1.0, batch_size=4)])
    groups = dict.fromkeys((each.batch_size, each.category) for each in figures)
    assert list(groups) == [(1, "all"), (1, "copy-heavy"), (1, "rag"), (1, "writing"), (4, "all"), (4, "copy-heavy"),
                            (4, "rag")]  # fmt: skip
    assert [each.answers for each in pick(figures, 1).values()] == [2, 2, 2, 2]
    assert list(pick(figures, 1)) == ["plain-fast", "plain", "ngram", "ort-genai"]


def test_figures_are_ratios_of_sums() -> None:
    overall = pick(summarize(RUNS), 1)
    fast, plain, ngram, genai = overall.values()
    assert [each.tokens_per_second for each in overall.values()] == [3.0, 2.0, 4.0, 4 / 3]
    assert [each.speedup for each in overall.values()] == [1.0, 2 / 3, 4 / 3, (4 / 3) / 3]
    assert [each.identical_to_plain for each in overall.values()] == [2, 2, 2, 1]
    assert [each.rounds for each in overall.values()] == [6, 6, 4, 0]
    assert ngram.speedup_peers == {"ort-genai": 3.0}
    assert (ngram.mean_accepted_length, plain.mean_accepted_length, genai.mean_accepted_length) == (1.5, 1.0, None)
    assert (ngram.acceptance_rate, ngram.alpha, ngram.acceptance_by_position) == (0.5, 0.5, (2 / 3, 0.0))
    assert (ngram.target_ms, ngram.draft_ms, ngram.host_ms) == (0.5, 1.0, 0.5)
    assert ngram.time_share == Share(0.25, 0.5, 0.25)
    assert genai.time_share is None
    assert fast.speedup_interval is None
    assert ngram.speedup_interval is not None
    assert ngram.speedup_interval.low < 4 / 3 < ngram.speedup_interval.high


def test_latencies_leave_the_queue_out_and_count_each_token_of_a_round() -> None:
    (ngram,) = (each for each in summarize(RUNS[:4]) if each.method == "ngram" and each.category == "all")
    assert ngram.ttft_ms == Percentiles(8.0, 8.0, 8.0)
    assert ngram.inter_token_ms == Percentiles(1.0, 1.0, 1.0)  # two tokens, two milliseconds after the first two


@pytest.mark.parametrize(("tokens", "gaps"), [(2, []), (3, [2.0]), (4, [1.0, 1.0]), (5, [1.0, 1.0, 4.0]),
                                              (7, [1.0, 1.0, 4 / 3, 4 / 3, 4 / 3])])  # fmt: skip
def test_what_the_end_of_an_answer_cuts_off_has_no_gap(tokens: int, gaps: list[float]) -> None:
    history = (Round(2, 1, 2.0), Round(1, 1, 4.0), Round(2, 2, 8.0))[: 1 + (tokens > 2) + (tokens > 4)]
    answer = Answer(question_id=1, token_ids=(7,) * tokens, decoded=tokens, history=history)
    assert answer.gaps_ms == gaps


def test_predictions_are_for_chains_one_at_a_time() -> None:
    costs = Costs(pass_ms={1: 2.0, 2: 3.0, 4: 5.0}, least={"plain-fast": 1, "plain": 1, "ngram": 1})
    figures = pick(summarize(RUNS, costs=costs), 1)
    passes = 4.0 + 3.0 + 2.0 + 3.0  # widths 3, 2, 1, 2
    assert figures["ngram"].predicted_speedup == (1.75 + 1.5 + 1.0 + 1.5) * 2.0 / (passes + 4.0)
    assert figures["plain"].predicted_speedup is None
    trees = Costs(pass_ms=costs.pass_ms, least={"plain-fast": 1, "plain": 1})
    assert pick(summarize(RUNS, costs=trees), 1)["ngram"].predicted_speedup is None
    together = [run("plain", 1, 1.0, batch_size=4), run("ngram", 1, 1.0, batch_size=4, history=DRAFTED)]
    assert pick(summarize(together, costs=costs), 4)["ngram"].predicted_speedup is None


def test_the_baseline_is_the_faster_plain_method_over_all_prompts() -> None:
    assert baseline(RUNS) == "plain-fast"
    assert baseline([run("plain-fast", 1, 3.0), run("plain", 1, 2.0), run("ngram", 1, 1.0)]) == "plain"
    assert baseline([run("ngram", 1, 1.0)]) is None


def test_without_references_there_are_no_ratios() -> None:
    (figures,) = pick(summarize([run("ngram", 2, 1.0)]), 1).values()
    assert (figures.speedup, figures.speedup_peers, figures.identical_to_plain) == (None, {}, None)
    assert figures.tokens_per_second == 4.0


def test_other_samples_are_not_compared_with_plain_decodings() -> None:
    assert {each.identical_to_plain for each in summarize(RUNS, repeatable=())} == {None}


def test_no_time_is_no_speed() -> None:
    (figures,) = pick(summarize([run("ort-genai", 2, 0.0, (7,), decoded=0, history=())]), 1).values()
    assert (figures.tokens_per_second, figures.speedup_peers) == (0.0, {"ort-genai": None})


def test_align() -> None:
    assert align([("a", "bb", "c"), ("ddd", "e", "ff")], left=1) == "a    bb   c\nddd   e  ff"


def test_a_peer_counts_in_the_fastest_of_its_modes() -> None:
    peers = [
        run("llama-cpp:plain", 1, 2.0),
        run("llama-cpp:plain", 2, 2.0),
        run("llama-cpp:lookup-3", 1, 1.0),
        run("llama-cpp:lookup-3", 2, 1.0),
    ]
    ours = [run("plain", 1, 1.0), run("plain", 2, 1.0), run("layerskip:2", 1, 0.5), run("layerskip:2", 2, 0.5)]
    figures = {name: each.speedup_peers for name, each in pick(summarize([*ours, *peers]), 1).items()}
    assert figures["plain"] == figures["llama-cpp:lookup-3"] == {"llama-cpp": 1.0}
    assert figures["layerskip:2"] == {"llama-cpp": 2.0}

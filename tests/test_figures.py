"""What runs add up to, on numbers that are exact in binary."""

from specdec.tools.figures import Figures, Run, align, baseline, summarize, table


def run(method: str, question: int, seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), **more: object) -> Run:
    category = {1: "rag", 2: "writing"}[question]
    fields = {"decoded": len(tokens), "rounds": len(tokens)} | more
    return Run(question_id=question, category=category, method=method, token_ids=tokens, seconds=seconds, **fields)


RUNS = [
    run("plain-fast", 1, 1.0, host_ms=2.0),
    run("plain", 1, 2.0),
    run(
        "ngram",
        1,
        0.5,
        rounds=2,
        proposed=8,
        accepted=2,
        host_ms=3.0,
        draft_ms=6.0,
        proposed_at=(2, 1),
        accepted_at=(1, 1),
    ),
    run("ort-genai", 1, 2.0, decoded=3, rounds=0),
    run("plain-fast", 2, 1.0, (1, 2)),
    run("plain", 2, 1.0, (1, 2)),
    run("ngram", 2, 1.0, (1, 2), proposed=2, accepted=0, proposed_at=(1,), accepted_at=(0,)),
    run("ort-genai", 2, 1.0, (1, 3), decoded=1, rounds=0),
]


def test_groups_are_all_copy_heavy_and_each_category() -> None:
    groups = summarize(RUNS)
    assert {name: figures[0].prompts for name, figures in groups.items()} == {
        "all": 2,
        "copy-heavy": 1,
        "rag": 1,
        "writing": 1,
    }
    assert [figures.method for figures in groups["all"]] == ["plain-fast", "plain", "ngram", "ort-genai"]
    assert list(summarize([each for each in RUNS if each.question_id == 2])) == ["all", "writing"]


def test_figures_are_ratios_of_sums() -> None:
    plain_fast, plain, ngram, genai = summarize(RUNS)["all"]
    assert plain_fast == Figures(
        method="plain-fast",
        prompts=2,
        tokens_per_second=3.0,
        speedup=1.0,
        speedup_peers={"ort-genai": 3.0 / (4 / 3)},
        mean_accepted_length=1.0,
        acceptance_rate=None,
        acceptance_by_position=(),
        draft_ms_per_round=0.0,
        host_ms_per_round=2 / 6,
        identical_to_plain=2,
    )
    assert (plain.tokens_per_second, plain.speedup, plain.identical_to_plain) == (2.0, 2 / 3, 2)
    assert ngram == Figures(
        method="ngram",
        prompts=2,
        tokens_per_second=4.0,
        speedup=4 / 3,
        speedup_peers={"ort-genai": 3.0},
        mean_accepted_length=1.5,
        acceptance_rate=0.2,
        acceptance_by_position=(1 / 3, 1.0),
        draft_ms_per_round=1.5,
        host_ms_per_round=0.75,
        identical_to_plain=2,
    )
    assert genai == Figures(
        method="ort-genai",
        prompts=2,
        tokens_per_second=4 / 3,
        speedup=(4 / 3) / 3,
        speedup_peers={"ort-genai": 1.0},
        mean_accepted_length=None,
        acceptance_rate=None,
        acceptance_by_position=(),
        draft_ms_per_round=None,
        host_ms_per_round=None,
        identical_to_plain=1,
    )


def test_the_speedup_of_equal_tokens_is_the_ratio_of_the_times() -> None:
    rag = {figures.method: figures for figures in summarize(RUNS)["rag"]}
    assert rag["ngram"].speedup == 1.0 / 0.5
    assert rag["plain"].speedup == 1.0 / 2.0


def test_the_baseline_is_the_faster_plain_method_over_all_prompts() -> None:
    assert baseline(RUNS) == "plain-fast"
    assert baseline([run("plain-fast", 1, 3.0), run("plain", 1, 2.0), run("ngram", 1, 1.0)]) == "plain"
    assert baseline([run("ngram", 1, 1.0)]) is None


def test_without_references_there_are_no_ratios() -> None:
    (figures,) = summarize([run("ngram", 1, 1.0)])["all"]
    assert (figures.speedup, figures.speedup_peers, figures.identical_to_plain) == (None, {}, None)
    assert figures.tokens_per_second == 4.0


def test_no_time_is_no_speed() -> None:
    (figures,) = summarize([run("ort-genai", 1, 0.0, (7,), decoded=0, rounds=0)])["all"]
    assert (figures.tokens_per_second, figures.speedup_peers) == (0.0, {"ort-genai": None})


def test_table() -> None:
    groups = {"all": summarize(RUNS)["all"][1:]}
    assert table(groups, "plain-fast").splitlines() == [
        "prompts  method     tokens/s  vs plain-fast  vs ort-genai     τ  accepted  by position  draft ms/round  "
        "host ms/round  as plain",
        "all (2)  plain          2.00          0.667         1.500  1.00         -            -            0.00  "
        "         0.00       2/2",
        "         ngram          4.00          1.333         3.000  1.50      0.20     .33 1.00            1.50  "
        "         0.75       2/2",
        "         ort-genai      1.33          0.444         1.000     -         -            -               -  "
        "            -       1/2",
    ]


def test_the_table_has_a_column_for_each_peer_that_ran() -> None:
    llama = [run("llama-cpp", 1, 0.75, decoded=3, rounds=0), run("llama-cpp", 2, 0.25, (1, 2), decoded=1, rounds=0)]
    groups = {"all": summarize([*RUNS, *llama])["all"][2:]}
    assert [line[:71].rstrip() for line in table(groups, "plain-fast").splitlines()] == [
        "prompts  method     tokens/s  vs plain-fast  vs ort-genai  vs llama-cpp",
        "all (2)  ngram          4.00          1.333         3.000         1.000",
        "         ort-genai      1.33          0.444         1.000         0.333",
        "         llama-cpp      4.00          1.333         3.000         1.000",
    ]
    alone = table({"all": summarize(RUNS[:3])["all"]}, "plain-fast")
    assert "vs plain-fast" in alone
    assert "vs ort-genai" not in alone


def test_align() -> None:
    assert align([("a", "bb", "c"), ("ddd", "e", "ff")], left=1) == "a    bb   c\nddd   e  ff"

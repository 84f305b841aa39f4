"""Plans against every other plan, times that follow the machine, and what is learned from what was kept."""

import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engines import costs
from specdec.engines.base import Capabilities
from specdec.engines.chunk import RowInput
from specdec.engines.costs import WIDTHS, cost_curve
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.controller import CURVE_TRUST, RECALL, STEADY, Controller, Mean, PassTimes, Plan, row_means
from specdec.runtime.drafters.adaptive import GAIN, PRIOR_TRUST, AdaptiveDrafter
from specdec.runtime.drafters.growth import StaticShape
from specdec.runtime.drafters.model import CATCH_UP, ModelDrafter
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.llm import LLM
from specdec.runtime.params import SamplingParams
from support.bundles import shared_bundle
from support.drafters import VOCAB, SteadyTimes, steady_controller, target
from support.fake_engine import FakeEngine, fake_spec
from support.rows import WatchedModel, greedy, make_row, make_scheduler, run

FLAT = {1: 1.0, 64: 1.0}  # positions cost nothing
STEEP = {1: 1.0, 64: 64.0}  # each costs as much as the first


def test_times_lie_on_the_curve_and_beyond_it_in_line() -> None:
    times = PassTimes({1: 10.0, 2: 11.0, 4: 15.0}, trust=10)
    assert [times.ms(1, width) for width in (1, 2, 3, 4, 6)] == [10, 11, 13, 15, 19]
    assert times.ms(2, 2) == 15
    assert times.ms(1, 2.5) == 12
    assert times.ms(3, 2) == 19


def test_all_times_follow_the_machine() -> None:
    times = PassTimes({1: 10.0, 2: 11.0, 4: 15.0}, trust=10)
    for _ in range(30):
        times.observe(1, 1, 20.0)  # twice as slow as at load
    assert times.ms(1, 4) == pytest.approx(30, rel=0.01)
    assert times.ms(1, 1) == pytest.approx(20, rel=0.01)
    times.observe(1, 1, 900.0)
    assert times.ms(1, 4) == pytest.approx(30, rel=0.01), "one that was disturbed says nothing"


def test_a_size_that_is_slower_than_the_curve_is_known_and_forgotten() -> None:
    times = PassTimes({1: 10.0, 4: 16.0}, trust=10)
    for _ in range(60):
        times.observe(1, 1, 10.0)
        times.observe(1, 3, 21.0)  # 14 by the curve
    assert times.ms(1, 3) == pytest.approx(21, rel=0.05)
    assert times.ms(1, 4) == pytest.approx(16, rel=0.3)
    for _ in range(2000):
        times.observe(1, 1, 10.0)
    assert times.ms(1, 3) == pytest.approx(14, rel=0.01)


def test_times_may_be_told_by_several_threads() -> None:
    times = PassTimes({1: 10.0, 4: 16.0}, trust=10)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            told = [pool.submit(times.observe, 1, 1 + n % 3, 10.0 + n % 3) for n in range(4000)]
        assert [each.exception() for each in told] == [None] * 4000
    finally:
        sys.setswitchinterval(before)
    assert times.ms(1, 1) == pytest.approx(10, rel=0.1)


def test_a_mean_forgets() -> None:
    mean = Mean(0.5)
    assert mean.value(0.3, 2) == 0.3
    mean.add(1)
    assert mean.value(0.4, 1) == 0.7
    mean.add(0)
    assert mean.value(0.0, 0) == pytest.approx(0.5 / 1.5)
    for _ in range(40):
        mean.fade()
    assert mean.value(0.3, 2) == pytest.approx(0.3)
    mean.add(1)
    mean.fade(0.25)
    assert mean.value(0.0, 0.75) == pytest.approx(0.25)


def plan(curve: dict[int, float], ladders: Sequence[Sequence[float]], gains: Sequence[float], **options: float):
    made = steady_controller(curve, options.pop("level_ms", 0.1), int(options.pop("least_width", 1)))
    return made.plan(ladders, gains, options.pop("depth", 1.0), [0.5, 0.5])


def test_free_positions_are_filled_and_dear_ones_are_not() -> None:
    assert plan(FLAT, [[0.1, 0.01]], [0.0]).width == 2
    assert plan(STEEP, [[0.9, 0.8]], [0.0]).width == 0
    assert plan(STEEP, [[0.9, 0.8]], [0.0], least_width=2).width == 1, "the second position is there anyway"
    assert plan({1: 1.0, 2: 1.5, 3: 2.0}, [[0.6, 0.36]], [0.0]).width == 1


def test_a_batch_widens_for_one_row_only_if_all_gain() -> None:
    curve = {1: 1.0, 4: 1.3, 8: 2.0, 32: 5.0}
    sure, none = [0.95, 0.9, 0.85], []
    assert plan(curve, [sure], [0.0]).width == 3
    assert plan(curve, [sure, *[none] * 7], [0.0] * 8).width == 0
    assert plan(curve, [sure] * 8, [0.0] * 8).width == 3


def test_a_drafter_is_asked_where_it_brings_more_than_it_costs() -> None:
    assert plan(FLAT, [[]], [0.3], level_ms=0.2).asked == (True,)
    assert plan(FLAT, [[]], [0.3], level_ms=0.4).asked == (False,)
    mixed = plan(FLAT, [[0.9, 0.8], [0.1]], [0.5, 0.7], level_ms=0.1)
    assert (mixed.width, mixed.asked) == (2, (False, True))


def test_a_plan_says_what_each_kind_promised() -> None:
    controller, plans = steady_controller({1: 1.0, 2: 1.5}, level_ms=0.1, least_width=1), list[Plan]()
    controller.watch = plans.append
    made = [controller.plan([[0.4]], [gain], 1.0, []) for gain in (0.55, 0.9, 0.1)]
    assert plans == made
    assert [each.kind for each in made] == ["plain", "asked", "plain"]
    assert made[0].rates == pytest.approx({"plain": 1.0, "free": 1.4 / 1.5, "asked": 1.55 / 1.6})
    assert made[1].rate == made[1].rates["asked"] == pytest.approx(1.9 / 1.6)
    assert set(made[2].rates) == {"plain", "asked"}, "1.4 tokens cannot be worth two positions: not looked at"
    assert controller.rounds == {"plain": 2, "free": 0, "asked": 1}


class Rounds:
    """One row for whose drafts alone the controller plans, and what they bring in truth."""

    def __init__(self, threshold: float) -> None:
        self.controller = steady_controller(FLAT, level_ms=threshold, least_width=1)
        self.own, self.asked = row_means(), list[bool]()

    def run(self, count: int, gain: float) -> float:
        """Share of the next `count` rounds that asked. A draft is kept `gain` of the time, evenly."""
        for step in range(count):
            expected = self.controller.mean("gain", GAIN, PRIOR_TRUST, self.own)
            self.asked.append(self.controller.plan([[]], [expected], 1.0, []).asked[0])
            if self.asked[-1]:
                self.controller.learn("gain", float((step + 1) * gain // 1 - step * gain // 1), self.own)
            else:
                self.controller.forget("gain", self.own)
        return sum(self.asked[-count:]) / count


@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.8])
def test_a_drafter_that_does_not_pay_is_tried_seldom_at_little_loss(threshold: float) -> None:
    """Trials cost `threshold` tokens each, and what they cost in the long run is under one token in a hundred."""
    rounds = Rounds(threshold)
    rounds.run(400, 0.0)
    share = rounds.run(2000, 0.0)
    assert 0 < share * threshold < 0.01


def test_a_drafter_that_pays_again_is_found_soon() -> None:
    rounds = Rounds(0.4)
    assert rounds.run(500, 0.7) == 1.0
    rounds.run(1000, 0.0)
    assert rounds.run(300, 0.0) < 0.05
    rounds.run(200, 0.7)
    assert rounds.run(100, 0.7) > 0.9


def test_a_drafter_whose_passes_were_disturbed_is_tried_again() -> None:
    """A slow spell of its passes says that it cannot pay; without passes, nothing would ever deny that."""
    controller = Controller(SteadyTimes(FLAT, 1), 1)
    controller.levels = PassTimes({1: 0.2, 2: 0.3}, CURVE_TRUST)
    assert controller.plan([[]], [0.5], 1.0, []).kind == "asked"
    for _ in range(STEADY):
        controller.levels.observe(1, 1, 9.0)
    silent = next(n for n in itertools.count() if controller.plan([[]], [0.5], 1.0, []).kind == "asked")
    assert 4 * RECALL < silent < 14 * RECALL


def test_prices_are_the_time_of_a_level_at_the_expected_rate() -> None:
    found = plan({1: 10.0, 2: 11.0, 3: 13.0, 4: 16.0}, [[]], [0.8], level_ms=1.0)
    rate = 1.8 / (11.0 + 1.0)
    assert found.rate == pytest.approx(rate)
    assert found.prices == pytest.approx((0.0, rate * (2.0 + 1.0) / 0.5, rate * (3.0 + 1.0) / 0.5))


chances = st.floats(0.01, 1.0)


@given(
    ladders=st.lists(st.lists(chances, max_size=4).map(lambda each: list(itertools.accumulate(each, min))), min_size=1,
                     max_size=4),
    gain=chances, curve=st.lists(st.floats(0.01, 3.0), min_size=3, max_size=3), level=st.floats(0.01, 2.0),
    least=st.sampled_from([1, 2]),
)  # fmt: skip
def test_no_plan_is_better(
    ladders: list[list[float]], gain: float, curve: list[float], level: float, least: int
) -> None:
    """Of all widths, each with nobody asked and with everybody asked whose own draft is worth less."""
    points = dict(zip((1, 4, 8, 40), itertools.accumulate([1.0, *curve]), strict=True))
    made = steady_controller(points, level, least)
    rows = len(ladders)

    def rate(width: int, *, ask: bool) -> float:
        free = [sum(ladder[:width]) for ladder in ladders]
        asked = [ask and gain > kept for kept in free]
        tokens = rows + sum(gain if is_asked else kept for is_asked, kept in zip(asked, free, strict=True))
        wide = max(least, 2 if any(asked) else 1, 1 if all(asked) else 1 + width)
        return tokens / (made.times.ms(rows, wide) + (made.levels.ms(rows, 1) if any(asked) else 0))

    best = max(rate(width, ask=ask) for width in range(max(map(len, ladders)) + 1) for ask in (False, True))
    found = made.plan(ladders, [gain] * rows, 1.0, [])
    assert found.rate == pytest.approx(best)
    assert found.rate >= rate(0, ask=False), "never slower than plain decoding, by what is known"


# The drafter that asks it


def adaptive(costly: ModelDrafter | None, controller: Controller, tokens: int = 4) -> AdaptiveDrafter:
    return AdaptiveDrafter(controller, NgramDrafter(tokens, 1, 4, threshold=0.0, always=True), costly, tokens)


def model(seed: int, tokens: int = 4, **options: object) -> ModelDrafter:
    draft = WatchedModel(FakeEngine(fake_spec(VOCAB), seed=seed, order=2, **options), max_rows=4, min_width=2)
    return ModelDrafter(draft, StaticShape.chain(tokens), VOCAB, VOCAB)


def test_a_good_draft_is_asked_and_a_bad_one_is_not() -> None:
    """At prices between: the target's own copy is kept (always), another model hardly ever."""
    for seed, asked in ((0, True), (7, False)):
        controller = steady_controller({1: 1.0, 16: 1.5}, level_ms=0.3)
        row = make_row([1, 2, 3], max_new_tokens=60)
        got = run(make_scheduler(target(), AdaptiveDrafter(controller, None, model(seed), 4)), row)[0]
        assert got == greedy(target(), [1, 2, 3], 60)
        assert (controller.rounds["asked"] > sum(controller.rounds.values()) / 2) == asked


def test_a_draft_that_comes_back_after_long_has_its_cache_right() -> None:
    """Asked once in a while, it takes in what it missed alone, in one pass, and is accepted like the target's copy."""
    controller = steady_controller({1: 1.0, 16: 1.0}, level_ms=0.1)
    costly = model(0)
    drafter = adaptive(costly, controller)
    fed: list[int] = []
    prefill = costly._model.prefill
    costly._model.prefill = lambda row, tokens, *more: (fed.append(len(tokens)), prefill(row, tokens, *more))  # type: ignore[assignment,func-returns-value]
    planned = controller.plan

    def seldom(ladders: Sequence[Sequence[float]], gains: Sequence[float], depth: float, follow: Sequence[float]):
        rounds[0] += 1
        return planned([[]] * len(ladders), [1.0 if rounds[0] % 12 == 0 else 0.0] * len(gains), depth, follow)

    rounds = [0]
    controller.plan = seldom  # type: ignore[method-assign]
    row = make_row([1, 2, 3], max_new_tokens=50)
    assert run(make_scheduler(target(), drafter), row)[0] == greedy(target(), [1, 2, 3], 50)
    assert row.stats.draft_tokens_accepted == row.stats.draft_tokens_proposed == 12
    # Round 12: 3 + 11 tokens, 2 in the cache. Then 5 are emitted, of which the draft holds 3, and 11 more rounds pass.
    assert [count for count in fed if count > CATCH_UP] == [11, 12, 12]


def test_chances_are_learned_by_all_and_by_each() -> None:
    """A row whose matches never hold gets no drafts in the end; the others' matches lose little by it."""
    controller = steady_controller({1: 1.0, 16: 1.9}, least_width=1)
    drafter = adaptive(None, controller)
    rows = [make_row([1, 2, 3, 1, 2], max_new_tokens=50), make_row([4, 5, 6, 4, 5], max_new_tokens=50)]
    for row in rows:
        drafter.admit(row)
    widths = []
    for _ in range(60):
        trees = drafter.propose([rows[0]], [9])
        widths.append(len(trees[0]))
        drafter.commit(0, rows[0], ())
    assert widths[0] > 0
    assert widths[-1] == 0
    key = ("match", 2, False)
    assert controller.mean(key, 0.46, 20, drafter._states[0].means) < 0.2
    assert controller.mean(key, 0.46, 20, drafter._states[1].means) > controller.mean(
        key, 0.46, 20, drafter._states[0].means
    )


def test_free_draft_alone_and_costly_draft_alone() -> None:
    for free, costly in ((True, None), (False, model(0))):
        controller = steady_controller({1: 1.0, 16: 1.2})
        drafter = AdaptiveDrafter(
            controller, NgramDrafter(4, 1, 4, threshold=0.0, always=True) if free else None, costly, 4
        )
        row = make_row([1, 2, 3, 1, 2], max_new_tokens=40)
        assert run(make_scheduler(target(), drafter), row)[0] == greedy(target(), [1, 2, 3, 1, 2], 40)
        assert row.stats.draft_tokens_accepted > 0


def test_passes_tell_what_they_took() -> None:
    times = PassTimes({1: 1e-3, 2: 1e-3}, trust=1)
    cached = WatchedModel(target(), max_rows=2, min_width=2, times=times)
    seen: list[tuple[int, int]] = []
    times.observe = lambda rows, width, ms: seen.append((rows, width))  # type: ignore[method-assign]
    cached.add_row()
    cached.prefill(0, [1, 2, 3, 4])
    cached.step([RowInput([5], 1)])
    cached.step([RowInput([5, 6, 7], 3)])
    assert seen == [(1, 2), (1, 3)], "prompts are no rounds"


# In a bundle


def test_it_plans_what_the_configuration_leaves_open() -> None:
    assert SpeculativeConfig().adaptive
    for options in ({"num_speculative_tokens": 4}, {"confidence_threshold": 0.2}, {"tree": "dynamic"}):
        assert not SpeculativeConfig(**options).adaptive
        with LLM(shared_bundle(), speculative=SpeculativeConfig(**options), verify=False) as llm:
            assert llm.controller is None
    with LLM(shared_bundle(), verify=False) as llm:
        assert llm.method == "ngram+model"
        (output,) = llm.generate([40, 41, 42, 40, 41], SamplingParams(max_new_tokens=20, ignore_eos=True))
        report = llm.controller.report()  # type: ignore[union-attr]
    assert sum(report["rounds"].values()) == output.stats.rounds
    assert set(report) == {"rounds", "target_ms", "draft_level_ms", "means"}


def test_costs_are_measured_once_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    engine = FakeEngine(fake_spec(VOCAB, max_length=600), min_width=2, prefilling=True)
    curve = cost_curve(engine, "graph one", 2)
    assert sorted(curve) == [width for width in WIDTHS if width > 1]
    assert all(ms > 0 for ms in curve.values())
    passes = len(engine.widths)
    assert cost_curve(engine, "graph one", 2) == curve
    assert len(engine.widths) == passes
    cost_curve(engine, "graph two", 2)
    other = FakeEngine(fake_spec(VOCAB, max_length=600), prefilling=True, capabilities=Capabilities(device="other"))
    cost_curve(other, "graph one", 2)
    assert (len(engine.widths), len(other.widths)) == (2 * passes, passes)
    (kept, *_) = sorted((tmp_path / "costs").iterdir())
    kept.write_bytes(b"{")
    for name in ("graph one", "graph two"):
        cost_curve(engine, name, 2)
    assert len(list((tmp_path / "costs").iterdir())) == 3


def test_costs_are_measured_within_the_limits_of_a_compiled_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    engine = FakeEngine(fake_spec(VOCAB, max_length=2000), prefilling=True)
    asked: list[int] = []
    allocate = engine.allocate
    engine.allocate = lambda rows, capacity: (asked.append(capacity), allocate(rows, capacity))[1]  # type: ignore[method-assign]
    assert list(cost_curve(engine, "graph", 1, most_width=6, slots=100)) == [1, 2, 3, 4, 6]
    assert (asked, max(engine.widths[1:])) == ([100], 6)
    assert list(cost_curve(engine, "graph", 1, most_width=64, slots=4096)) == list(WIDTHS)
    assert asked == [100, 512]


def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(costs, "cache_dir", lambda: tmp_path / "file")
    engine = FakeEngine(fake_spec(VOCAB, max_length=600), prefilling=True)
    assert cost_curve(engine, "graph", 1).keys() == set(WIDTHS)


def test_times_that_no_pass_changes_are_a_pass_time() -> None:
    times = SteadyTimes({1: 1.0}, 1)
    times.observe(1, 1, 9.0)
    assert times.ms(1, 1) == 1.0

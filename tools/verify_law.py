"""Is what the runtime emits distributed as plain decoding? Thousands of short answers against the exact distribution.

Every case runs the whole runtime, from `LLM.generate` to the cache, on tables of the engine's logits (`tables.py`), and
compares how often each answer came with its exact probability. On the way three things must hold without exception:
every token was chosen from the bits of its own text's logits, greedy answers are the argmaxes, and with `coupled` each
seed's answer is that of plain decoding.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from time import perf_counter

import msgspec

from specdec.engines.manifest import BLOCKWISE, Manifest, NgramDrafter
from specdec.runtime import RequestOutput
from specdec.runtime.params import Acceptance
from specdec.tools.evidence import Fit, fit
from specdec.tools.verify_ground import DifferenceError, Drafts, Ground, Setting, Tree

_SETTINGS: tuple[tuple[Tree, Setting], ...] = (  # what shows a fault soonest comes first; at most 32 answers each
    ("chain", Setting(0.0, 0, 8, terms=True, ends=False)),
    ("dynamic", Setting(0.0, 0, 8, terms=True, ends=False)),
    ("chain", Setting(1.0, 3, 3, terms=False, ends=False)),
    ("dynamic", Setting(1.0, 3, 3, terms=True, ends=True)),
    ("chain", Setting(0.7, 2, 5, terms=True, ends=False)),
    ("dynamic", Setting(0.7, 2, 4, terms=False, ends=False)),
)
_GREEDY_SAMPLES = 4
_COUPLED_SHARE = 4  # of the samples: each is compared with plain decoding's for the same seed, which sees more
_FULL_SHARE = 8  # of the samples on the whole vocabulary, whose arrays are a thousand times longer


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: `samples` answers to one request. `full`: over the whole vocabulary, not over the likely tokens.

    `method` None is plain decoding, whose coupled answers are those that others are compared with.
    """

    method: str | None
    rule: Acceptance
    tree: Tree
    drafts: Drafts
    setting: Setting
    batch: int
    samples: int
    full: bool = False


class LawResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a case gave. `problem`: why it failed, None when it did not. `fit`: None if the runtime broke.

    `power`: whether drafts were both accepted and rejected; a test without power proves nothing about them.
    `disturbed`: whether the draft's logits were. `tau`: tokens per target pass. `bits`: logits compared with the table.
    """

    case: Case
    fit: Fit | None
    problem: str | None
    power: bool
    disturbed: bool
    tau: float
    proposed: int
    accepted: int
    bits: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing was found against the runtime."""
        return self.problem is None


def plan(
    manifest: Manifest,
    methods: Sequence[str],
    rules: Sequence[Acceptance],
    batches: Sequence[int],
    samples: int,
    *,
    trees: bool,
) -> list[Case]:
    """All cases, those that show a fault soonest first. Batch sizes take turns."""
    chosen: list[tuple[str | None, Acceptance, Tree, Drafts, Setting]] = []
    for tree, setting in _SETTINGS:
        if tree == "chain" and setting.temperature and "coupled" in rules:
            chosen.append((None, "coupled", tree, "none", setting))
        for method in (each for each in methods if tree == "chain" or (trees and each != BLOCKWISE)):
            for rule, drafts in _verified(manifest, method, rules, tree, setting):
                chosen.append((method, rule, tree, drafts, setting))
    cases = [
        Case(
            method=method,
            rule=rule,
            tree=tree,
            drafts=drafts,
            setting=setting,
            batch=batches[turn % len(batches)],
            samples=_samples(samples, setting, rule if method else None),
        )
        for turn, (method, rule, tree, drafts, setting) in enumerate(chosen)
    ]
    few = max(1, samples // _FULL_SHARE)
    firsts = {case.method: case for case in reversed(cases) if case.setting == _SETTINGS[2][1]}
    return cases + [msgspec.structs.replace(firsts[method], samples=few, full=True) for method in methods]


def _samples(most: int, setting: Setting, rule: Acceptance | None) -> int:
    if not setting.temperature:
        return _GREEDY_SAMPLES
    return max(1, most // _COUPLED_SHARE) if rule == "coupled" else most


def _verified(
    manifest: Manifest, method: str, rules: Sequence[Acceptance], tree: Tree, setting: Setting
) -> Iterator[tuple[Acceptance, Drafts]]:
    """Which rules verify which drafts of a method in a setting; where `block` is the rule `token`, one of them."""
    looked_up = isinstance(manifest.drafters.get(method), NgramDrafter)
    other: Sequence[Acceptance] = [rule for rule in rules if rule != "block"] or rules
    if setting.temperature == 0:  # no rule takes part, and drafts are ranked in any case
        yield rules[0], "looked up" if looked_up else "ranked"
    elif looked_up or method == BLOCKWISE:
        drafts: Drafts = "looked up" if looked_up else "ranked"
        yield from ((rule, drafts) for rule in (rules if (tree, setting) == _SETTINGS[2] else other))
    else:
        every = tree == "chain" or (tree, setting) == _SETTINGS[3]  # a tree may come out as a chain
        yield from ((rule, "sampled") for rule in (rules if every else other))
        if (tree, setting) != _SETTINGS[2]:
            yield other[0], "ranked"


def run(ground: Ground, case: Case, false_alarm: float, seeds: Sequence[int]) -> LawResult:
    """Run one case; `seeds`: one for each sample. `false_alarm`: probability that a sound runtime may fail with."""
    started, watched = perf_counter(), ground.watched
    found: list[RequestOutput] = []
    result: Fit | None = None
    try:
        found = _answers(ground, case, seeds)
        counts = Counter(output.token_ids for output in found)
        result = fit(counts, ground.law(case.setting, full=case.full), false_alarm)
        problem = _problem(case, result)
        if problem is None and case.rule == "coupled" and case.method and case.setting.temperature:
            problem = _compare_seeds(ground, case, seeds, found)
    except Exception as exc:  # whatever a broken runtime raises
        kind = "" if isinstance(exc, DifferenceError) else f"the runtime broke: {type(exc).__name__}: "
        problem = f"{kind}{' '.join(str(exc).split())}"
    stats = [output.stats for output in found]
    proposed, accepted = (
        sum(getattr(one, f"draft_tokens_{what}") for one in stats) for what in ("proposed", "accepted")
    )
    rounds = {one.rounds for one in stats}
    return LawResult(
        case=case,
        fit=result,
        problem=problem,
        # in a tree siblings are rejected in any case: there the rounds say whether chance decided
        power=case.method is None or (0 < accepted < proposed and (len(rounds) > 1 or not case.setting.temperature)),
        disturbed=case.method in ground.disturbed,
        tau=sum(one.new_tokens for one in stats) / max(1, sum(one.rounds for one in stats)),
        proposed=proposed,
        accepted=accepted,
        bits=ground.watched - watched,
        seconds=perf_counter() - started,
    )


def _answers(ground: Ground, case: Case, seeds: Sequence[int]) -> list[RequestOutput]:
    if case.method is None:
        return ground.plain(case.setting, seeds, full=case.full)
    llm = ground.llm(case.method, case.tree, case.drafts, case.batch, case.full)
    params = [ground.params(case.setting, acceptance=case.rule, seed=seed) for seed in seeds]
    return llm.generate([ground.prompt(full=case.full)] * len(seeds), params)


def _problem(case: Case, found: Fit) -> str | None:
    if found.passed:
        return None
    if not case.setting.temperature:
        return "a greedy answer is not made of the target's argmaxes"
    if found.impossible:
        return f"{found.impossible} answers that plain decoding cannot give"
    return (
        f"another distribution of answers: total variation {found.variation:.3f} (bound {found.variation_bound:.3f}), "
        f"entropy {found.entropy:.0f} (bound {found.entropy_bound:.0f})"
    )


def _compare_seeds(ground: Ground, case: Case, seeds: Sequence[int], found: Sequence[RequestOutput]) -> str | None:
    plain = ground.plain(case.setting, seeds, full=case.full)
    pairs = zip(seeds, plain, found, strict=True)
    other = [seed for seed, one, output in pairs if one.token_ids != output.token_ids]
    return f"{len(other)} seeds, such as {other[0]}, give another answer than without speculation" if other else None

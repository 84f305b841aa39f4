"""What runs of decoding methods add up to: speed, acceptance, latencies and their intervals, per group of prompts.

Pure: how a run came about is not known here, nor how figures are shown (`bench_report.py`, `bench_html.py`).
"""

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

import msgspec

from specdec.runtime.request import Round
from specdec.tools.intervals import Interval, Percentiles, Sums, interval, percentiles, ratios
from specdec.tools.theory import acceptance, predicted_speedup

FAST, PLAIN = "plain-fast", "plain"  # the references
PEERS = ("transformers", "ort-genai", "llama-cpp", "openvino")  # every other method is a drafter
ALL, COPYING = "all", "copy-heavy"
COPY_HEAVY = frozenset({"extraction", "translation", "math", "math_reasoning", "rag"})  # Spec-Bench categories


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. Fields of `request.Stats` mean what they mean there.

    `decoded`: tokens that its run's seconds were spent on. A peer tells no rounds and no split of its time.
    """

    question_id: int | str
    turn: int = 1
    token_ids: tuple[int, ...]
    decoded: int
    prompt_tokens: int = 0
    draft_tokens_proposed: int = 0
    draft_tokens_accepted: int = 0
    bonus_tokens: int = 0
    ttft_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    target_ms: float = 0.0
    draft_ms: float = 0.0
    host_ms: float = 0.0
    history: tuple[Round, ...] = ()

    @property
    def gaps_ms(self) -> list[float]:
        """Time between two rounds over the tokens of the later one, once for each of these tokens."""
        left, gaps = len(self.token_ids), list[float]()
        for before, after in pairwise(self.history):
            left -= before.kept + 1
            tokens = min(after.kept + 1, left)  # the answer may end within the last round
            gaps += [(after.ms - before.ms) / tokens] * tokens
        return gaps


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one unit: a conversation, or (`batch_size` > 1) prompts that ran together. `seconds`: of decoding.

    Units have the same number with every method; `category` is that of the unit's prompts.
    """

    method: str
    batch_size: int = 1
    unit: int
    category: str
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def decoded(self) -> int:
        """Tokens that the seconds were spent on."""
        return sum(answer.decoded for answer in self.answers)


class Share(msgspec.Struct, frozen=True):
    """Shares of the time of rounds; their sum is 1."""

    target: float
    draft: float
    host: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one group of runs; None where it has no such figure or its reference did not run.

    What each one means: `bench_report.DEFINITIONS`.
    """

    method: str
    batch_size: int
    category: str
    answers: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    draft_tokens_proposed: int
    draft_tokens_accepted: int
    bonus_tokens: int
    tokens_per_second: float
    speedup: float | None
    speedup_interval: Interval | None
    speedup_peers: dict[str, float | None]
    predicted_speedup: float | None
    mean_accepted_length: float | None
    acceptance_rate: float | None
    alpha: float | None
    acceptance_by_position: tuple[float, ...]
    ttft_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    target_ms: float | None
    draft_ms: float | None
    host_ms: float | None
    time_share: Share | None
    identical_to_plain: int | None


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions need: milliseconds of a pass of one row by width, and each method's narrowest pass.

    Methods that draft trees are not in `least`: the formula is about chains.
    """

    pass_ms: dict[int, float]
    least: dict[str, int]


def peer_of(method: str) -> str | None:
    """Name the peer that a method is of, `PEER` or `PEER:MODE`; None: it is ours."""
    name = method.partition(":")[0]
    return name if name in PEERS else None


def baseline(runs: Sequence[Run]) -> str | None:
    """Name the plain method of this package that decodes fastest over all runs."""
    speeds = {name: _speed([run for run in runs if run.method == name]) for name in (FAST, PLAIN)}
    fastest = max(speeds, key=speeds.__getitem__)
    return fastest if speeds[fastest] else None


def summarize(
    runs: Sequence[Run], *, costs: Costs | None = None, repeatable: Container[str] | None = None
) -> list[Figures]:
    """Return the figures of every method by batch size: over all runs, the copy-heavy ones, and each category.

    `repeatable`: methods that say what plain decoding says if they are lossless (greedy, or coupled to the same seeds);
    None: all.
    """
    found = []
    for batch in dict.fromkeys(run.batch_size for run in runs):
        own = [run for run in runs if run.batch_size == batch]
        groups = {ALL: own, COPYING: [run for run in own if run.category in COPY_HEAVY]}
        for category in dict.fromkeys(run.category for run in own if run.category != ALL):
            groups[category] = [run for run in own if run.category == category]
        fastest = baseline(own)
        for name, group in groups.items():
            found += _figures(name, group, fastest, costs if batch == 1 else None, repeatable)
    return found


def _figures(
    category: str, runs: Sequence[Run], fastest: str | None, costs: Costs | None, repeatable: Container[str] | None
) -> list[Figures]:
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    plain = {_key(answer): answer.token_ids for run in methods.get(PLAIN, ()) for answer in run.answers}
    reference = methods.get(fastest or "", [])
    peers = _peer_speeds(methods)
    figures = []
    for method, own in methods.items():
        answers = [answer for run in own for answer in run.answers]
        history = [each for answer in answers for each in answer.history]
        proposed, kept = (sum(getattr(answer, f"draft_tokens_{name}") for answer in answers)
                          for name in ("proposed", "accepted"))  # fmt: skip
        times = [sum(getattr(answer, f"{name}_ms") for answer in answers) for name in ("target", "draft", "host")]
        speed, rounds = _speed(own), len(history)
        paired = ratios(sums(own), sums(reference)) if reference and method != fastest else ratios(([], []), ([], []))
        figures.append(
            Figures(
                method=method,
                batch_size=own[0].batch_size,
                category=category,
                answers=len(answers),
                prompt_tokens=sum(answer.prompt_tokens for answer in answers),
                new_tokens=sum(len(answer.token_ids) for answer in answers),
                rounds=rounds,
                draft_tokens_proposed=proposed,
                draft_tokens_accepted=kept,
                bonus_tokens=sum(answer.bonus_tokens for answer in answers),
                tokens_per_second=speed,
                speedup=_ratio(speed, _speed(reference)),
                speedup_interval=interval(paired),
                speedup_peers={name: _ratio(speed, of_peer) for name, of_peer in peers.items()},
                predicted_speedup=_predicted(method, history, times[1], costs, fastest),
                mean_accepted_length=_ratio(sum(answer.decoded for answer in answers), rounds),
                acceptance_rate=_ratio(kept, proposed),
                alpha=acceptance(history),
                acceptance_by_position=by_position(history),
                ttft_ms=percentiles([answer.ttft_ms - answer.queue_ms for answer in answers if answer.history]),
                inter_token_ms=percentiles([gap for answer in answers for gap in answer.gaps_ms]),
                target_ms=_ratio(times[0], rounds),
                draft_ms=_ratio(times[1], rounds),
                host_ms=_ratio(times[2], rounds),
                time_share=Share(*(time / sum(times) for time in times)) if sum(times) else None,
                identical_to_plain=sum(plain.get(_key(answer)) == answer.token_ids for answer in answers)
                if plain and (repeatable is None or method in repeatable) else None,
            )
        )  # fmt: skip
    return figures


def _peer_speeds(methods: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Speed of each peer in its fastest mode."""
    speeds: dict[str, float] = {}
    for method, own in methods.items():
        if peer := peer_of(method):
            speeds[peer] = max(speeds.get(peer, 0.0), _speed(own))
    return speeds


def by_position(history: Sequence[Round]) -> tuple[float, ...]:
    """Share of the drafts at least 1, 2, ... deep that were kept to there."""
    deepest = max((each.depth for each in history), default=0)
    return tuple(
        sum(each.kept >= place for each in history) / sum(each.depth >= place for each in history)
        for place in range(1, deepest + 1)
    )


def sums(runs: Sequence[Run]) -> Sums:
    """Tokens and seconds of each run."""
    return [run.decoded for run in runs], [run.seconds for run in runs]


def _predicted(
    method: str, history: Sequence[Round], draft_ms: float, costs: Costs | None, fastest: str | None
) -> float | None:
    if costs is None or fastest is None or method not in costs.least:
        return None
    decode_ms = costs.pass_ms[costs.least.get(fastest, 1)]
    return predicted_speedup(history, draft_ms, costs.pass_ms, costs.least[method], decode_ms)


def _key(answer: Answer) -> tuple[int | str, int]:
    return answer.question_id, answer.turn


def _speed(runs: Sequence[Run]) -> float:
    """Tokens per second of all runs together, 0 without any."""
    return _ratio(sum(run.decoded for run in runs), sum(run.seconds for run in runs)) or 0.0


def _ratio(value: float, reference: float) -> float | None:
    return value / reference if reference else None


def pick(figures: Sequence[Figures], batch_size: int, category: str = ALL) -> Mapping[str, Figures]:
    """Figures of every method for one batch size and category."""
    return {each.method: each for each in figures if (each.batch_size, each.category) == (batch_size, category)}


def align(rows: Sequence[Sequence[str]], left: int) -> str:
    """Align columns: the first `left` to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def pipe_table(rows: Sequence[Sequence[str]]) -> str:
    """Render rows as a table in Markdown; the first one is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])

"""What runs of decoding methods add up to: speed, τ and acceptance per group of prompts, and the table that shows it.

Pure: how a run came about is not known here.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec

FAST, PLAIN = "plain-fast", "plain"  # the references
PEERS = GENAI, LLAMA = "ort-genai", "llama-cpp"  # every other method is a drafter
SHOWN = 5  # positions of a draft in the table; all are in the JSON
COPY_HEAVY = frozenset({"extraction", "translation", "math", "math_reasoning", "rag"})  # Spec-Bench categories


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of one method. `decoded` tokens took `seconds`; no `rounds` means that a peer does not tell them.

    `proposed_at`, `accepted_at`: as in `request.Stats`.
    """

    question_id: int | str
    category: str
    method: str
    token_ids: tuple[int, ...]
    decoded: int
    seconds: float
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    host_ms: float = 0.0
    draft_ms: float = 0.0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one group of prompts; None where it has no such figure or its reference did not run.

    `speedup` is against the fastest plain decoding of all runs, `speedup_peers` against each peer that ran: ratios of
    tokens/s, which is the ratio of the times where the tokens are the same. `identical_to_plain` counts prompts.
    `acceptance_by_position`: share of the drafts at least so deep that were kept to depth 1, 2, ...
    """

    method: str
    prompts: int
    tokens_per_second: float
    speedup: float | None
    speedup_peers: dict[str, float | None]
    mean_accepted_length: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    draft_ms_per_round: float | None
    host_ms_per_round: float | None
    identical_to_plain: int | None


def baseline(runs: Sequence[Run]) -> str | None:
    """Name the plain method of this package that decodes fastest over all runs."""
    speeds = {name: _speed([run for run in runs if run.method == name]) for name in (FAST, PLAIN)}
    fastest = max(speeds, key=speeds.__getitem__)
    return fastest if speeds[fastest] else None


def summarize(runs: Sequence[Run]) -> dict[str, list[Figures]]:
    """Return the figures of every method over all prompts, the copy-heavy ones, and each category."""
    groups = {"all": list(runs), "copy-heavy": [run for run in runs if run.category in COPY_HEAVY]}
    for category in dict.fromkeys(run.category for run in runs):
        groups[category] = [run for run in runs if run.category == category]
    fastest = baseline(runs)
    return {name: _figures(group, fastest) for name, group in groups.items() if group}


def _figures(runs: Sequence[Run], fastest: str | None) -> list[Figures]:
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    plain = {run.question_id: run.token_ids for run in methods.get(PLAIN, ())}
    reference = _speed(methods.get(fastest or "", ()))
    peers = {name: _speed(methods[name]) for name in PEERS if name in methods}
    figures = []
    for method, own in methods.items():
        speed = _speed(own)
        rounds, proposed = sum(run.rounds for run in own), sum(run.proposed for run in own)
        figures.append(
            Figures(
                method=method,
                prompts=len(own),
                tokens_per_second=speed,
                speedup=_ratio(speed, reference),
                speedup_peers={name: _ratio(speed, of_peer) for name, of_peer in peers.items()},
                mean_accepted_length=_ratio(sum(run.decoded for run in own), rounds),
                acceptance_rate=_ratio(sum(run.accepted for run in own), proposed),
                acceptance_by_position=_by_position(own),
                draft_ms_per_round=_ratio(sum(run.draft_ms for run in own), rounds),
                host_ms_per_round=_ratio(sum(run.host_ms for run in own), rounds),
                identical_to_plain=sum(plain[run.question_id] == run.token_ids for run in own) if plain else None,
            )
        )
    return figures


def table(groups: Mapping[str, Sequence[Figures]], fastest: str | None) -> str:
    """Render the figures as aligned plain text, one block of lines per group, a column for each peer that ran."""
    peers = [name for name in PEERS if any(name in each.speedup_peers for of in groups.values() for each in of)]
    rows = [("prompts", "method", "tokens/s", f"vs {fastest or PLAIN}", *(f"vs {name}" for name in peers), "τ",
             "accepted", "by position", "draft ms/round", "host ms/round", f"as {PLAIN}")]  # fmt: skip
    for name, figures in groups.items():
        for row, each in enumerate(figures):
            same = each.identical_to_plain
            rows.append(
                (
                    f"{name} ({each.prompts})" if row == 0 else "",
                    each.method,
                    f"{each.tokens_per_second:.2f}",
                    _cell(each.speedup, ".3f"),
                    *(_cell(each.speedup_peers.get(name), ".3f") for name in peers),
                    _cell(each.mean_accepted_length, ".2f"),
                    _cell(each.acceptance_rate, ".2f"),
                    " ".join(f"{share:.2f}".removeprefix("0") for share in each.acceptance_by_position[:SHOWN]) or "-",
                    _cell(each.draft_ms_per_round, ".2f"),
                    _cell(each.host_ms_per_round, ".2f"),
                    "-" if same is None else f"{same}/{each.prompts}",
                )
            )
    return align(rows, left=2)


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


def _by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    kept, drafted = (
        [sum(of) for of in zip_longest(*(getattr(run, name) for run in runs), fillvalue=0)]
        for name in ("accepted_at", "proposed_at")
    )
    return tuple(one / all_ for one, all_ in zip(kept, drafted, strict=True))


def _speed(runs: Sequence[Run]) -> float:
    """Tokens per second of all runs together, 0 without any."""
    return _ratio(sum(run.decoded for run in runs), sum(run.seconds for run in runs)) or 0.0


def _ratio(value: float, reference: float) -> float | None:
    return value / reference if reference else None


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

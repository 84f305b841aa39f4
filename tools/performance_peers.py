"""What documentation shows of results beside others: other runtimes, and the same weights in fp32.

Pure, as `performance_tables.py`, whose helpers it uses.
"""

from collections.abc import Iterator, Mapping, Sequence

from specdec.tools.bench_html import best_drafter
from specdec.tools.bench_report import Report, cell
from specdec.tools.damage import Cost
from specdec.tools.damage import Report as DamageReport
from specdec.tools.figures import PLAIN, Figures, peer_of, pick, pipe_table
from specdec.tools.pairs import TARGET
from specdec.tools.performance_tables import NONE, Result, as_plain, gain, only, own_figures


def peers(results: Sequence[Result]) -> str:
    """Ours beside the best mode of each peer; what that is of our plain decoding is of its own run."""
    rows: list[tuple[str, ...]] = [("", "runtime", "mode", "tokens/s", "× our plain (95 %)", "its own plain × ours",
                                    f"as {PLAIN}", "KL, nats")]  # fmt: skip
    quality = {(cost.role.partition(" ")[0], precision): cost for precision, cost in _costs(results)}
    for precision, reports in _by_precision(only(Report, results, others=True)).items():
        ours, kl, label = own_figures(reports[0]), _kl(quality.get((TARGET, precision))), precision
        for each in (ours[PLAIN], best_drafter(ours)):
            if each:
                rows.append((label, "specdec", f"`{each.method}`", f"{each.tokens_per_second:.1f}", gain(each), NONE,
                             as_plain(each), kl))  # fmt: skip
            label = ""
        for peer, report, modes in _peers(reports):
            version = f"{peer} {report.peers[peer].partition('-')[0]}"
            if not modes:
                rows.append(("", version, "all failed", *[NONE] * 5))
                continue
            best, plain = _fastest(modes), modes.get(f"{peer}:{PLAIN}")
            rows.append(("", version, f"`{best.method.partition(':')[2]}`", f"{best.tokens_per_second:.1f}",
                         gain(best), cell(plain.speedup if plain else None, ".2f"), as_plain(best),
                         _kl(quality.get((peer, precision)))))  # fmt: skip
    return pipe_table(rows)


def precisions(results: Sequence[Result]) -> str:
    """Of each precision our own speed, plain and drafting, and its damage."""
    rows = [("", "MB", "KL, nats", "top-1", "plain, tokens/s", "best drafter, tokens/s", "× plain (95 %)")]
    own = {precision: cost for precision, cost in _costs(results) if cost.role == TARGET}
    for report in only(Report, results, others=True):
        name, ours = report.bundle.precision, own_figures(report)
        cost, best = own[name], best_drafter(ours) or ours[PLAIN]
        rows.append((f"`{name}`", f"{cost.size / 1e6:.0f}", _kl(cost), _top1(cost),
                     f"{ours[PLAIN].tokens_per_second:.0f}", f"{best.tokens_per_second:.0f}", gain(best)))  # fmt: skip
    return pipe_table(rows)


def standing(results: Sequence[Result]) -> str:
    """How fast our best method is beside every peer's, in turn with it, in a sentence for each precision."""
    lines = []
    for precision, reports in _by_precision(only(Report, results)).items():
        shares = []
        for peer, report, modes in _peers(reports):
            ours = own_figures(report)
            best = best_drafter(ours) or ours[PLAIN]
            if modes:
                shares.append(f"{best.speedup_peers[peer] or 0:.2f} of {peer}")
        lines.append(f"- {precision}, beside other runtimes in their fastest modes: `{best.method}` decodes at "
                     f"{', '.join(shares)}.")  # fmt: skip
    return "\n".join(lines)


def damage(results: Sequence[Result]) -> str:
    """Bytes and quality of each engine against the same weights in fp32."""
    rows = [("", "", "MB", "KL, nats", "top-1", "tokens")]
    label = None
    for precision, cost in _costs(results):
        name = "specdec" if cost.role == TARGET else cost.role.partition("-3")[0]
        head = "" if precision == label else precision
        label = precision
        if cost.damage:
            rows.append((head, name, f"{cost.size / 1e6:.0f}", _kl(cost), _top1(cost), f"{cost.damage.tokens:,}"))
    return pipe_table(rows)


def _peers(reports: Sequence[Report]) -> Iterator[tuple[str, Report, Mapping[str, Figures]]]:
    """Every peer and its modes over all prompts, from the report in which fewest of them failed."""
    for peer in dict.fromkeys(name for report in reports for name in report.peers):
        failed = {len([each for each in report.peer_failures if each.peer == peer]): report
                  for report in reversed(reports) if peer in report.peers}  # fmt: skip
        report = failed[min(failed)]
        yield peer, report, {name: each for name, each in pick(report.figures, 1).items() if peer_of(name) == peer}


def _fastest(modes: Mapping[str, Figures]) -> Figures:
    return max(modes.values(), key=lambda each: each.speedup or 0)


def _costs(results: Sequence[Result]) -> list[tuple[str, Cost]]:
    """What was compared with fp32, and in which precision: peers run in that of the bundle that was named first."""
    found = []
    for report in (each for each in results if isinstance(each, DamageReport)):
        own = [each for each in report.engines if each.precision]
        named = [each for each in own if each.bundle != report.reference] or own
        found += [(each.precision or named[0].precision or "", each) for each in report.engines
                  if each in named or each.precision is None]  # fmt: skip
    return found


def _by_precision(reports: Sequence[Report]) -> dict[str, list[Report]]:
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(report.bundle.precision, []).append(report)
    return found


def _kl(cost: Cost | None) -> str:
    return cell(cost.damage.mean_kl if cost and cost.damage else None, ".4f")


def _top1(cost: Cost) -> str:
    return f"{cost.damage.top1_agreement:.1%}" if cost.damage else NONE

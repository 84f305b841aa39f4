"""What runs of peers add up to: speed of every mode, the best one, what its speculation reproduces, and its damage.

Pure: how a run came about is not known here.
"""

from collections.abc import Mapping, Sequence

import msgspec

from specdec.engines.damage import Damage
from specdec.tools.figures import align
from specdec.tools.peers.driver import PLAIN

NOT_GIVEN = "not given"
LOGITS = "logits"  # in place of a mode, where a peer failed while it was compared


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a report stores."""


class PeerRun(_Record, frozen=True):
    """One answer of one mode: `decoded` of its tokens took `seconds`, the others came with the prompt's pass."""

    peer: str
    mode: str
    question_id: int | str
    token_ids: tuple[int, ...]
    decoded: int
    seconds: float


class PeerModel(_Record, frozen=True):
    """A peer that was started: its package's version, its model's bytes, its modes. `damage` None: no logits."""

    peer: str
    version: str
    size: int
    modes: tuple[str, ...]
    damage: Damage | None = None


class PeerFailure(_Record, frozen=True):
    """What a peer said when it could not be set up (`mode` ""), when a mode of it ended, or while giving `LOGITS`."""

    peer: str
    mode: str
    message: str

    @property
    def name(self) -> str:
        """`PEER` or `PEER:MODE`."""
        return f"{self.peer}:{self.mode}" if self.mode else self.peer


class ModeReport(_Record, frozen=True):
    """One mode on `prompts` prompts; counts are of prompts, None where there is nothing to compare with.

    `identical_to_plain`: as the peer's own plain decoding. `identical_to_ours`: as the tokens that were given as ours.
    """

    mode: str
    prompts: int
    tokens_per_second: float | None
    identical_to_plain: int | None
    identical_to_ours: int | None
    failure: str | None = None


class PeerReport(_Record, frozen=True):
    """One peer: its modes in their order, and the name of the fastest of those that ran all prompts.

    `version`, `size` None: it was not started, and `failure` says why. `damage` None: it gives no logits, none were
    asked for, or `damage_failure` says why.
    """

    peer: str
    precision: str
    version: str | None
    size: int | None
    damage: Damage | None
    modes: list[ModeReport]
    best: str | None
    failure: str | None = None
    damage_failure: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the best mode."""
        return next((each.tokens_per_second for each in self.modes if each.mode == self.best), None)


def peer_reports(
    precision: str,
    models: Sequence[PeerModel],
    runs: Sequence[PeerRun],
    failures: Sequence[PeerFailure] = (),
    ours: Mapping[int | str, Sequence[int]] | None = None,
) -> list[PeerReport]:
    """Sum up runs; `ours` are our own tokens by question, cut to the length of the peer's before they are compared."""
    known = {model.peer: model for model in models}
    reports = []
    for peer in dict.fromkeys((*known, *(each.peer for each in failures))):
        own = [run for run in runs if run.peer == peer]
        failed = {each.mode: each.message for each in failures if each.peer == peer}
        names = known[peer].modes if peer in known else ()
        modes = [_mode(name, own, failed.get(name), ours) for name in names]
        whole = [each for each in modes if not each.failure and each.tokens_per_second]
        best = max(whole, key=lambda each: each.tokens_per_second or 0.0, default=None)
        model = known.get(peer)
        reports.append(
            PeerReport(
                peer=peer,
                precision=precision,
                version=model.version if model else None,
                size=model.size if model else None,
                damage=model.damage if model else None,
                modes=modes,
                best=best.mode if best else None,
                failure=failed.get(""),
                damage_failure=failed.get(LOGITS),
            )
        )
    return reports


def _mode(
    name: str, runs: Sequence[PeerRun], failure: str | None, ours: Mapping[int | str, Sequence[int]] | None
) -> ModeReport:
    own = [run for run in runs if run.mode == name]
    plain = {run.question_id: run.token_ids for run in runs if run.mode == PLAIN}
    decoded, seconds = sum(run.decoded for run in own), sum(run.seconds for run in own)
    return ModeReport(
        mode=name,
        prompts=len(own),
        tokens_per_second=decoded / seconds if seconds else None,
        identical_to_plain=_same(own, plain) if plain and name != PLAIN else None,
        identical_to_ours=_same(own, ours) if ours else None,
        failure=failure,
    )


def _same(runs: Sequence[PeerRun], expected: Mapping[int | str, Sequence[int]]) -> int:
    return sum(tuple(expected.get(run.question_id, ()))[: len(run.token_ids)] == run.token_ids for run in runs)


def peer_table(reports: Sequence[PeerReport]) -> str:
    """Render reports as aligned plain text: a line for each mode, the best one marked, and one for each failure."""
    rows: list[tuple[str, ...]] = [
        ("peer", "version", "mode", "", "tokens/s", "as its plain", "as ours", "KL (nats)", "top-1", "MB")
    ]
    notes = []
    for report in reports:
        damage = report.damage
        quality = (f"{damage.mean_kl:.4f}", f"{damage.top1_agreement:.1%}") if damage else (NOT_GIVEN, NOT_GIVEN)
        size = "-" if report.size is None else f"{report.size / 1e6:.0f}"
        for each in report.modes:
            speed = "-" if each.tokens_per_second is None else f"{each.tokens_per_second:.2f}"
            counts = (each.identical_to_plain, each.identical_to_ours)
            same = ("-" if count is None else f"{count}/{each.prompts}" for count in counts)
            head = (f"{report.peer} {report.precision}", report.version or "-", each.mode)
            rows.append((*head, "best" if each.mode == report.best else "", speed, *same, *quality, size))
            notes += [f"{report.peer}:{each.mode}: {each.failure}"] if each.failure else []
        notes += [f"{report.peer}: {report.failure}"] if report.failure else []
        notes += [f"{report.peer}: {LOGITS}: {report.damage_failure}"] if report.damage_failure else []
    return "\n".join(([align(rows, left=4)] if len(rows) > 1 else []) + notes)

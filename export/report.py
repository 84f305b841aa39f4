"""What a new bundle's engines cost: size, damage by quantization, and milliseconds a pass on this machine.

The manifest has what does not depend on the machine; passes are timed here and stored nowhere. What drafts of one
precision are worth to targets of another is a comparison of bundles, which is not known here.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from specdec.engines.costs import PassCost, pass_costs
from specdec.engines.damage import Damage
from specdec.engines.manifest import Manifest
from specdec.engines.registry import EngineConfig, open_engine

SHOWN = (1, 2, 4, 8)  # tokens of a pass, in the text; batch 1


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One graph of a bundle. `megabytes`: of its weights on disk (10^6 bytes; none of a graph cut out of the target).

    `damage`: None when not quantized, or not measured.
    """

    role: str
    precision: str
    megabytes: float
    damage: Damage | None
    pass_costs: list[PassCost]


def make_report(bundle: Path, manifest: Manifest) -> list[EngineReport]:
    """Time the passes of every graph of `bundle` with ONNX Runtime on the CPU; all threads, one graph at a time."""
    return list(_engines(bundle, manifest))


def report_text(report: list[EngineReport]) -> str:
    """The report as lines of text."""
    lines = []
    for engine in report:
        times = {cost.width: cost.best_ms for cost in engine.pass_costs if cost.batch == 1}
        passes = ", ".join(f"{width}: {times[width]:.1f}" for width in SHOWN)
        lines.append(f"{engine.role} {engine.precision}: {engine.megabytes:.0f} MB; ms a pass by tokens {passes}")
    lines.append("speculation never changes the target's text; the target's precision does: lossless is relative to it")
    return "\n".join(lines)


def _engines(bundle: Path, manifest: Manifest) -> Iterator[EngineReport]:
    for role, model in manifest.models():
        for precision, variant in model.variants.items():
            if model.spec.dtype == "bfloat16":
                continue  # no engine here runs it
            with closing(open_engine(bundle / variant.graph, model.spec, EngineConfig())) as engine:
                costs = pass_costs(engine)
            data = manifest.files.get(f"{variant.graph}.data")
            size = data.bytes / 1e6 if data is not None else 0.0
            yield EngineReport(role=role, precision=precision, megabytes=size, damage=variant.damage, pass_costs=costs)

"""`specdec-export`: the command line of the export.

Parses, shows progress on a terminal, prints the result. The heavy libraries are imported after parsing, so `--help` and
mistakes answer at once. This module knows nothing of checkpoints and graphs.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from specdec.engines.command import CommandParser
from specdec.export.offline import hush, run_offline
from specdec.export.options import DEFAULT_BACKENDS, DEFAULT_DRAFTERS, DRAFTERS, ExportOptions, Progress
from specdec.export.recipes import BACKENDS, PRECISIONS

if TYPE_CHECKING:
    from specdec.engines.manifest import Manifest

PROG = "specdec-export"
NOT_OPTIONS = ("json", "quiet", "debug", "report")  # of the command, not of the export
EXAMPLES = """examples:
  specdec-export ./SmolLM2-135M-Instruct -o smollm2.bundle
  specdec-export model.gguf -o model.bundle --drafter ngram --drafter model:small.gguf
  specdec-export Qwen/Qwen3-0.6B -o qwen3.bundle --precision int8 --draft-precision int4 --max-length 4096 --json
  specdec-export ./SmolLM2-135M-Instruct -o skipping.bundle --drafter ngram --drafter layerskip:20
  specdec-export ./SmolLM2-135M-Instruct -o heads.bundle --drafter medusa:./smollm2-medusa --precision int8
  specdec-export ./llama -o llama.bundle --precision fp8 --calibration prompts.jsonl --backend tensorrt-rtx --arch sm89
"""


def build_parser() -> argparse.ArgumentParser:
    """The options; defaults are `ExportOptions`'s own."""
    default = {field.name: field.default for field in fields(ExportOptions)}
    parser = CommandParser(
        PROG,
        "Turn a checkpoint into a bundle: ONNX graph with KV cache, tokenizer, drafters, measured gates.",
        EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a hub id (org/name) or a .gguf file")
    parser.add_argument("-o", "--output", metavar="BUNDLE", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--drafter", metavar="SPEC", action="append", help=f"{' | '.join(DRAFTERS)}; repeatable (default: ngram)"
    )
    parser.add_argument(
        "--precision",
        metavar="P",
        default=default["precision"],
        help=f"{' | '.join(PRECISIONS)} (default: %(default)s)",
    )
    parser.add_argument("--draft-precision", metavar="P", help="precision of the draft model (default: the target's)")
    parser.add_argument(
        "--keep",
        metavar="PATTERN",
        action="append",
        help="weights not to quantize, by their names in the checkpoint, as 'model.layers.0.*'; repeatable",
    )
    parser.add_argument(
        "--tap",
        metavar="TAP",
        action="append",
        help="hidden state that the target hands out: final, or after how many layers; repeatable",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="prompts that scales are chosen on, JSON lines or paragraphs (default: a small built-in set)",
    )
    parser.add_argument(
        "--backend",
        metavar="B",
        action="append",
        help=f"{' | '.join(BACKENDS)}; repeatable (default: {', '.join(DEFAULT_BACKENDS)})",
    )
    parser.add_argument(
        "--arch",
        metavar="SM",
        action="append",
        help="GPU architecture to compile TensorRT-RTX plans for, as sm89; repeatable",
    )
    parser.add_argument("--workspace", metavar="MIB", type=int, help="most GPU memory that a layer of a plan may use "
                        "(default: the library's)")  # fmt: skip
    for name, what in (("max_batch", "rows"), ("max_length", "tokens of a row"), ("max_tree", "nodes of a draft tree")):
        shown = default[name] if default[name] is not None else "the model's, up to 8192"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="N",
            type=int,
            default=default[name],
            help=f"{what} (default: {shown})",
        )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code that MODEL brings along")
    parser.add_argument("--force", action="store_true", help="replace an existing bundle, once the new one is whole")
    parser.add_argument(
        "--report", action="store_true", help="time passes of every graph, and say what quantization cost"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress and no notes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_offline(PROG, partial(_export, arguments), debug=arguments.debug)


def _export(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    settings = {name: value for name, value in vars(arguments).items() if name not in NOT_OPTIONS}
    settings["output"] = arguments.output.expanduser()
    settings["drafters"] = tuple(settings.pop("drafter") or DEFAULT_DRAFTERS)
    settings["backends"] = tuple(settings.pop("backend") or DEFAULT_BACKENDS)
    settings["archs"] = tuple(settings.pop("arch") or ())
    settings["keep"] = tuple(settings.pop("keep") or ())
    settings["taps"] = tuple(settings.pop("tap") or ())
    options = ExportOptions(**settings)
    if not arguments.debug:
        hush()
    pipeline = importlib.import_module("specdec.export.pipeline")
    progress = Progress() if arguments.quiet else _Bars() if sys.stderr.isatty() else _Notes()
    with progress:
        manifest: Manifest = pipeline.export_bundle(options, progress)
    seconds = round(time.monotonic() - started, 1)
    reporting = importlib.import_module("specdec.export.report")
    report = reporting.make_report(options.output, manifest) if arguments.report else None
    if arguments.json:
        record: dict[str, Any] = {
            "bundle": str(options.output),
            "seconds": seconds,
            "manifest": msgspec.to_builtins(manifest),
            **({"report": msgspec.to_builtins(report)} if report is not None else {}),
        }
        print(json.dumps(record))
    else:
        print(_summary(options, manifest, seconds))
        if report is not None:
            print(reporting.report_text(report))
    return 0


class _Notes(Progress):
    """Notes on standard error, for logs; no bars."""

    def note(self, text: str) -> None:
        print(f"{PROG}: {text}", file=sys.stderr)


class _Bars(Progress):
    """One bar per stage on standard error."""

    def __init__(self) -> None:
        rich = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(stderr=True)
        columns = (rich.TextColumn("{task.description:<20}"), rich.BarColumn(), rich.TimeElapsedColumn())
        self._bars = rich.Progress(*columns, console=console)
        self._current: Any = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish()
        self._bars.stop()

    def stage(self, name: str) -> None:
        self._finish()
        self._current = self._bars.add_task(name, total=None)

    def advance(self, done: int, total: int) -> None:
        self._bars.update(self._current, completed=done, total=total)

    def note(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)

    def _finish(self) -> None:
        if self._current is not None:
            self._bars.update(self._current, completed=1, total=1)
            self._bars.stop_task(self._current)


def _summary(options: ExportOptions, manifest: "Manifest", seconds: float) -> str:
    size = sum(record.bytes for record in manifest.files.values())
    lines = [
        f"{options.output}: {size / 2**20:.0f} MiB, drafters: {', '.join(manifest.drafters) or 'none'}, {seconds} s"
    ]
    for role, model in manifest.models():
        for variant in model.variants.values():
            parity, bits = variant.parity, variant.invariance
            lines.append(
                f"{role} {variant.precision}: at most {parity.max_abs_error:.1e} off PyTorch (tolerance "
                f"{parity.tolerance:.1e}, {parity.positions} positions), bit-equal in {bits.scorings} scorings"
            )
            if (cost := variant.damage) is not None:
                lines.append(
                    f"  against fp32, {cost.tokens} tokens: KL {cost.mean_kl:.4f}, top-1 {cost.top1_agreement:.1%}, "
                    f"perplexity {cost.perplexity:.2f} (fp32 {cost.reference_perplexity:.2f})"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

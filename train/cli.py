"""`specdec-train`: the command line of training.

Parses, shows progress on a terminal (lines elsewhere), prints the result. The heavy libraries are imported after
parsing, so `--help` and mistakes answer at once. This module knows nothing of models and data.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from specdec.engines.command import CommandParser, positive
from specdec.export.offline import hush, run_offline
from specdec.train.options import DEFAULT_DRAFT_VOCAB, DEFAULT_TOKENS, METHODS, TrainOptions, TrainProgress

if TYPE_CHECKING:
    from specdec.train.run import Training

PROG = "specdec-train"
NOT_OPTIONS = ("json", "quiet", "debug")
LINE_SECONDS = 20.0  # between lines of a log
ABOUT = {
    "medusa": "heads that guess the next tokens from one state of the target (arXiv:2401.10774)",
    "eagle": "one layer that drafts on the target's states, token by token (EAGLE-3, arXiv:2503.01840)",
    "distill": "a draft model of some of the target's layers",
}
EXAMPLES = """examples:
  specdec-train eagle ./SmolLM2-135M-Instruct -o smollm2.eagle
  specdec-train medusa model.gguf -o model.medusa --heads 4 --draft-vocab 4096 --minutes 30
  specdec-train distill ./SmolLM2-135M-Instruct -o smollm2.small --layers 0-3,28,29 --data smollm2.data
  specdec-export ./SmolLM2-135M-Instruct -o smollm2.bundle --drafter eagle:smollm2.eagle
"""


def build_parser() -> argparse.ArgumentParser:
    """One parser for each method; defaults are `TrainOptions`'s own."""
    default = {field.name: field.default for field in fields(TrainOptions)}
    parser = CommandParser(PROG, "Train a drafter for a target, on what the target itself writes.", EXAMPLES)
    methods = parser.add_subparsers(dest="method", metavar="METHOD", required=True)
    for method in METHODS:
        about = ABOUT[method]
        one = methods.add_parser(method, help=about, description=f"Train {about}.", epilog=EXAMPLES)
        one.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a hub id (org/name) or a .gguf file")
        one.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="the folder to make; the same "
                         "command goes on with a run that was interrupted")  # fmt: skip
        one.add_argument(
            "--data", metavar="DIR", type=Path, help="texts to learn from, kept and added to (default: DIR.data)"
        )
        one.add_argument(
            "--tokens",
            metavar="N",
            type=positive,
            help=f"how many the target has to have written (default: what is there, else {DEFAULT_TOKENS} "
            "or half of the minutes)",
        )
        one.add_argument(
            "--prompts", metavar="FILE", type=Path, help="what the target is asked (default: it asks itself)"
        )
        budget = one.add_mutually_exclusive_group()
        budget.add_argument(
            "--minutes", type=float, default=default["minutes"], help="for data and training (default: %(default)g)"
        )
        budget.add_argument("--steps", metavar="N", type=positive, help="train for N steps: the same bits every time")
        _method_options(one, method, default)
        one.add_argument("--learning-rate", metavar="X", type=float, default=default["learning_rate"])
        one.add_argument("--step-tokens", metavar="N", type=positive, default=default["step_tokens"],
                         help="tokens of a step (default: %(default)s)")  # fmt: skip
        one.add_argument("--checkpoint-minutes", metavar="X", type=float, default=default["checkpoint_minutes"])
        one.add_argument("--seed", type=int, default=default["seed"])
        one.add_argument("--device", default=default["device"], help="of torch, as cuda (default: %(default)s)")
        one.add_argument("--revision", help="branch, tag or commit of a hub id")
        one.add_argument("--trust-remote-code", action="store_true", help="run the Python code that MODEL brings along")
        one.add_argument("--force", action="store_true", help="train anew where DIR holds something")
        one.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        one.add_argument("--quiet", action="store_true", help="no progress and no notes")
    return parser


def _method_options(parser: argparse.ArgumentParser, method: str, default: Mapping[str, Any]) -> None:
    """What only one or two of the methods have."""
    if method == "distill":
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--layers", metavar="LIST", help="layers of the target that stay, as in 0-3,28,29")
        which.add_argument("--keep", metavar="N", type=positive, help="how many stay, evenly spaced")
        parser.add_argument("--train-embeddings", action="store_true", help="train embedding and head as well")
        return
    parser.add_argument("--draft-vocab", metavar="N", type=positive,
                        help=f"most frequent tokens that it can draft (default: {DEFAULT_DRAFT_VOCAB})")  # fmt: skip
    if method == "medusa":
        parser.add_argument(
            "--heads", metavar="K", type=positive, default=default["heads"], help="(default: %(default)s)"
        )
        return
    parser.add_argument("--taps", metavar="TAP", nargs="+", help="hidden states of the target that it reads, final or "
                        "after how many layers (default: middle, high and final)")  # fmt: skip
    parser.add_argument("--init", metavar="DIR", type=Path, help="begin with the weights, taps and draft vocabulary of "
                        "this drafter, of EAGLE-3's format")  # fmt: skip
    parser.add_argument("--self-fed", metavar="N", type=int, default=default["self_fed"],
                        help="pairs of a chain fed with its own states in training (default: %(default)s)")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_offline(PROG, partial(_train, arguments), debug=arguments.debug)


def _train(arguments: argparse.Namespace) -> int:
    settings = {name: value for name, value in vars(arguments).items() if name not in NOT_OPTIONS}
    for name in {"output", "data", "prompts", "init"} & settings.keys():
        settings[name] = settings[name] and settings[name].expanduser()
    if settings.get("taps"):
        settings["taps"] = tuple(settings["taps"])
    options = TrainOptions(**settings)
    if not arguments.debug:
        hush()
    progress = TrainProgress() if arguments.quiet else _Bars() if sys.stderr.isatty() else _Lines()
    with progress:
        training: Training = importlib.import_module("specdec.train.run").train(options, progress)
    if arguments.json:
        print(json.dumps({"output": str(options.output), **msgspec.to_builtins(training)}))
    else:
        by_position = ", ".join(f"{share:.2f}" for share in training.acceptance)
        print(
            f"{options.output}: {training.parameters / 1e6:.1f}M parameters, {training.steps} steps in "
            f"{training.seconds / 60:.1f} min on {training.data.tokens} tokens\n"
            f"held-out texts: τ {training.tau:.2f}, acceptance by position {by_position}"
        )
    return 0


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


class _Lines(TrainProgress):
    """Lines on standard error, for logs: stages, estimates, and how far it is every now and then."""

    def __init__(self) -> None:
        self._stage, self._last = "", 0.0

    def stage(self, name: str) -> None:
        self._stage, self._last = name, time.monotonic()
        self.note(name)

    def advance(self, done: float, total: float, figures: Mapping[str, float] | None = None) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS or "τ" in (figures or {}):
            self._last = now
            self.note(f"{self._stage}: {done / total:.0%} {_shown(figures or {})}")

    def note(self, text: str) -> None:
        print(f"{PROG}: {text}", file=sys.stderr, flush=True)


class _Bars(TrainProgress):
    """One bar per stage on standard error, with the time that is left and the last figures."""

    def __init__(self) -> None:
        rich = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(stderr=True)
        columns = (rich.TextColumn("{task.description:<16}"), rich.BarColumn(), rich.TaskProgressColumn(),
                   rich.TimeElapsedColumn(), rich.TimeRemainingColumn(),
                   rich.TextColumn("{task.fields[figures]}"))  # fmt: skip
        self._bars = rich.Progress(*columns, console=console)
        self._current: Any = None
        self._figures: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def stage(self, name: str) -> None:
        if self._current is not None:
            self._bars.update(self._current, completed=1, total=1)
            self._bars.stop_task(self._current)
        self._figures = {}
        self._current = self._bars.add_task(name, total=None, figures="")

    def advance(self, done: float, total: float, figures: Mapping[str, float] | None = None) -> None:
        self._figures |= figures or {}
        self._bars.update(self._current, completed=done, total=total, figures=_shown(self._figures))

    def note(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)


if __name__ == "__main__":
    sys.exit(main())

"""What an export can be asked for, and how it reports: the vocabulary shared by the command line and the pipeline.

Importable without torch, so that `--help` and wrong usage answer at once. This module knows names, limits and defaults;
it does no work.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from specdec.engines.errors import RequestError
from specdec.export.recipes import BACKENDS, ORT, TENSORRT, check_arch, find_recipe

DRAFTERS = ("ngram", "model:PATH", "layerskip:N", "medusa:DIR", "eagle:DIR", "none")
DEFAULT_DRAFTERS = ("ngram",)
_MODEL, _SKIP, _MEDUSA, _EAGLE = "model:", "layerskip:", "medusa:", "eagle:"
DEFAULT_BACKENDS = ORT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """One export. `max_length` None: the model's own, up to a cap; `draft_precision` None: the target's.

    `archs`: GPU architectures ("sm89") to compile for. `workspace`: MiB of GPU memory that a layer may use (None: the
    library's default). `calibration`: prompts that scales are chosen on (None: the built-in ones). `keep`: patterns of
    weights that are not quantized. `taps`: hidden states that the target hands out, "final" or after how many layers.
    Raises `RequestError` for a name that is unknown, a limit below one, or a precision
    that one of `backends` or `archs` does not take.
    """

    model: str
    output: Path
    drafters: tuple[str, ...] = DEFAULT_DRAFTERS
    precision: str = "fp32"
    draft_precision: str | None = None
    backends: tuple[str, ...] = DEFAULT_BACKENDS
    archs: tuple[str, ...] = ()
    workspace: int | None = None
    calibration: Path | None = None
    keep: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    max_batch: int = 8
    max_length: int | None = None
    max_tree: int = 64
    revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if unknown := [backend for backend in self.backends if backend not in BACKENDS]:
            raise RequestError(_not_available("backend", unknown[0], BACKENDS))
        if self.archs and not set(self.backends) & set(TENSORRT):
            raise RequestError(f"--arch is of {' and '.join(TENSORRT)}: name one of them with --backend")
        recipes = [find_recipe(name, self.backends) for name in (self.precision, self.draft_precision) if name]
        for recipe in recipes:
            for arch in self.archs:
                check_arch(recipe, arch)
        if (self.keep or self.calibration) and all(recipe.weights is None for recipe in recipes):
            raise RequestError(f"--keep and --calibration are of quantized precisions: {self.precision} is none")
        if self.workspace is not None and not set(self.backends) & set(TENSORRT):
            raise RequestError(f"--workspace is of {' and '.join(TENSORRT)}: name one of them with --backend")
        check_drafters(self.drafters)
        for tap in self.taps:
            if not re.fullmatch(r"final|[1-9][0-9]*", tap) or self.taps.count(tap) > 1:
                raise RequestError(f"tap {tap} must be final or a number of layers, as in 7, and stand once")
        if self.taps and (ORT[0] not in self.backends or self.precision == "bf16"):
            raise RequestError("hidden states (--tap) are handed out on backend ort alone, which has no bf16: add it")
        if self.draft_precision and not any(name.startswith((_MODEL, _EAGLE)) for name in self.drafters):
            raise RequestError(
                "--draft-precision is of a draft model or an EAGLE drafter (--drafter model:PATH, eagle:DIR): "
                "other drafters have the target's"
            )
        if skip_depths(self.drafters) and ORT[0] not in self.backends:
            raise RequestError("drafter layerskip shares the target's cache, which backend ort alone can: add it")
        reads = next((name for name in self.drafters if name.startswith((_MEDUSA, _EAGLE))), None)
        if reads is not None and (ORT[0] not in self.backends or self.precision == "bf16"):
            raise RequestError(
                f"drafter {reads.partition(':')[0]} reads hidden states, which backend ort alone hands out, "
                "without bf16: add it"
            )
        for name, value in (
            ("max_batch", self.max_batch),
            ("max_length", self.max_length),
            ("max_tree", self.max_tree),
            ("workspace", self.workspace),
        ):
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}: it must be at least 1")


class Progress:
    """Hears what the export is doing; this one keeps quiet, the command line shows bars while it is open (`with`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The export has ended, well or not."""

    def stage(self, name: str) -> None:
        """A stage begins, and with it the one before has ended."""

    def advance(self, done: int, total: int) -> None:
        """`done` of `total` bytes of the current stage."""

    def note(self, text: str) -> None:
        """Something the user should know; not an error."""


def check_drafters(drafters: Sequence[str]) -> None:
    """Raise `RequestError` unless every drafter is known and they go together."""
    for drafter in drafters:
        if drafter not in ("ngram", "none") and not drafter.startswith((_MODEL, _SKIP, _MEDUSA, _EAGLE)):
            raise RequestError(_not_available("drafter", drafter, DRAFTERS))
        if drafter.startswith(_SKIP) and not re.fullmatch(r"[1-9][0-9]*", drafter.removeprefix(_SKIP)):
            raise RequestError(f"drafter {drafter} needs a number of layers, as in layerskip:8")
    if "none" in drafters and len(drafters) > 1:
        raise RequestError("drafter none stands alone")
    if len(set(drafters)) < len(drafters):
        raise RequestError("a bundle holds one drafter of each kind")
    for kind, what in ((_MODEL, "PATH"), (_MEDUSA, "DIR"), (_EAGLE, "DIR")):
        if sum(name.startswith(kind) for name in drafters) > 1:
            raise RequestError("a bundle holds one drafter of each kind")
        if kind in drafters:
            raise RequestError(f"drafter {kind} needs a checkpoint, as in {kind}{what}")


def draft_source(drafters: Sequence[str]) -> str | None:
    """The checkpoint of the `model:` drafter, if there is one."""
    return next((name.removeprefix("model:") for name in drafters if name.startswith("model:")), None)


def medusa_source(drafters: Sequence[str]) -> Path | None:
    """The folder of the `medusa:` drafter, if there is one."""
    return _folder(drafters, _MEDUSA)


def eagle_source(drafters: Sequence[str]) -> Path | None:
    """The folder of the `eagle:` drafter, if there is one."""
    return _folder(drafters, _EAGLE)


def _folder(drafters: Sequence[str], kind: str) -> Path | None:
    found = (name.removeprefix(kind) for name in drafters if name.startswith(kind))
    return next((Path(name).expanduser() for name in found), None)


def skip_depths(drafters: Sequence[str]) -> tuple[int, ...]:
    """How many of the target's layers each `layerskip:` drafter has."""
    return tuple(int(name.removeprefix(_SKIP)) for name in drafters if name.startswith(_SKIP))


def _not_available(kind: str, name: str, known: Sequence[str]) -> str:
    return f"{kind} {name} is not available in this version: choose from {', '.join(known)}"

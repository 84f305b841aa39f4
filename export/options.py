"""What an export can be asked for, and how it reports: the vocabulary shared by the command line and the pipeline.

Importable without torch, so that `--help` and wrong usage answer at once. This module knows names, limits and defaults;
it does no work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from specdec.engines.contract import Dtype
from specdec.engines.errors import RequestError

PRECISIONS: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16"}
BACKENDS = ("ort",)
DRAFTERS = ("ngram", "model:PATH", "none")
DEFAULT_DRAFTERS = ("ngram",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """One export. `max_length` None: the model's own, up to a cap; `draft_precision` None: the target's.

    Raises `RequestError` for a name that is unknown or a limit below one.
    """

    model: str
    output: Path
    drafters: tuple[str, ...] = DEFAULT_DRAFTERS
    precision: str = "fp32"
    draft_precision: str | None = None
    backend: str = "ort"
    max_batch: int = 8
    max_length: int | None = None
    max_tree: int = 64
    revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for precision in (self.precision, self.draft_precision or self.precision):
            if precision not in PRECISIONS:
                raise RequestError(_not_available("precision", precision, tuple(PRECISIONS)))
        if self.backend not in BACKENDS:
            raise RequestError(_not_available("backend", self.backend, BACKENDS))
        check_drafters(self.drafters)
        for name, value in (
            ("max_batch", self.max_batch),
            ("max_length", self.max_length),
            ("max_tree", self.max_tree),
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
        if drafter not in ("ngram", "none") and not drafter.startswith("model:"):
            raise RequestError(_not_available("drafter", drafter, DRAFTERS))
    if "none" in drafters and len(drafters) > 1:
        raise RequestError("drafter none stands alone")
    if len(set(drafters)) < len(drafters) or sum(name.startswith("model:") for name in drafters) > 1:
        raise RequestError("a bundle holds one drafter of each kind")
    if "model:" in drafters:
        raise RequestError("drafter model: needs a checkpoint, as in model:PATH")


def draft_source(drafters: Sequence[str]) -> str | None:
    """The checkpoint of the `model:` drafter, if there is one."""
    return next((name.removeprefix("model:") for name in drafters if name.startswith("model:")), None)


def _not_available(kind: str, name: str, known: Sequence[str]) -> str:
    return f"{kind} {name} is not available in this version: choose from {', '.join(known)}"

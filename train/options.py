"""What a training can be asked for, and how it reports: the vocabulary shared by the command line and the work.

Importable without torch, so that `--help` and wrong usage answer at once. This module knows names, limits and defaults;
it does no work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from specdec.engines.errors import RequestError

Method = Literal["medusa", "eagle", "distill"]
METHODS: tuple[Method, ...] = ("medusa", "eagle", "distill")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One training.

    `data`: folder of `train.data` (None: beside `output`); `tokens`: how many it must hold (None: those that are there,
    or `DEFAULT_TOKENS`); `prompts`: file of what the target is asked (None: it asks itself). `minutes`: budget of data
    and training together; `steps`: of optimizer steps instead, which makes a run repeatable. `draft_vocab`: tokens that
    the drafter knows (None: `DEFAULT_DRAFT_VOCAB`). `heads`: of Medusa. `taps`, `self_fed`: of EAGLE, hidden states
    that it reads (None: the usual ones) and how many pairs of a chain are fed with its own states in training. `init`:
    folder of an EAGLE-3 drafter whose weights, taps and draft vocabulary are the beginning (None: a new one).
    `layers`, `keep`: of distill, which layers of the target stay, or how many. `step_tokens`: tokens of an optimizer
    step. Raises `RequestError` for a number below one, or options that exclude each other.
    """

    method: Method
    model: str
    output: Path
    data: Path | None = None
    prompts: Path | None = None
    tokens: int | None = None
    minutes: float = 60.0
    steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    draft_vocab: int | None = None
    heads: int = 3
    taps: tuple[str, ...] | None = None
    self_fed: int = 2
    init: Path | None = None
    layers: str | None = None
    keep: int | None = None
    train_embeddings: bool = False
    learning_rate: float = 1e-3
    step_tokens: int = 4096
    checkpoint_minutes: float = 3.0
    revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "steps", "draft_vocab", "heads", "keep", "step_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}: it must be at least 1")
        for name in ("minutes", "learning_rate"):
            if not getattr(self, name) > 0:
                raise RequestError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.self_fed < 0 or self.checkpoint_minutes < 0 or self.seed < 0:
            raise RequestError("self_fed, checkpoint_minutes and seed must not be negative")
        if self.method == "distill" and (self.layers is None) == (self.keep is None):
            raise RequestError("distill needs --layers or --keep, one of the two")
        if self.init is not None and (self.taps or self.draft_vocab):
            raise RequestError(f"--taps and --draft-vocab are those of {self.init}: leave them out")
        for tap in self.taps or ():
            if not re.fullmatch(r"final|[1-9][0-9]*", tap):
                raise RequestError(f"tap {tap} must be final or a number of layers, as in 7")

    @property
    def data_folder(self) -> Path:
        """Where the texts lie, or will."""
        return self.data or self.output.with_name(f"{self.output.name}.data")


DEFAULT_TOKENS = 200_000
DEFAULT_DRAFT_VOCAB = 8192


class TrainProgress:
    """Hears how far a training is; this one keeps quiet, the command line shows bars while it is open (`with`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The training has ended, well or not."""

    def stage(self, name: str) -> None:
        """A stage begins, and with it the one before has ended."""

    def advance(self, done: float, total: float, figures: Mapping[str, float] | None = None) -> None:
        """`done` of `total` of the current stage; `figures`: what was measured last, by name."""

    def note(self, text: str) -> None:
        """Something the user should know; not an error."""

"""The loop that trains every drafter: batches in a fixed order, AdamW, checkpoints, estimates on held-out texts.

A run of `steps` is a function of its seed: killed anywhere and begun again it goes on from its last checkpoint and ends
with the same bits. A budget of minutes counts the time spent, before and after a kill. This module knows a learner by
its loss and its guesses; it knows no drafter.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from specdec.engines.errors import ExportError, RequestError
from specdec.train.batches import Batch, Step, collate, epoch_steps, micro_batches, positions
from specdec.train.data import TextRow
from specdec.train.figures import Figures
from specdec.train.options import TrainProgress
from specdec.train.saved import load_state, save_state

WARMUP = 0.05  # share of the budget in which the learning rate rises
LEAST = 0.001  # share of the budget that the first step counts as: it learns too
EVALUATIONS = 20  # estimates during a run, at most
ESTIMATE_SHARE = 0.1  # of the tokens that are trained on, at most so many are estimated on: one costs about the other
PATIENCE = 6  # estimates in which neither τ nor the loss gets better, after which a run ends
ESTIMATE_TOKENS = 16384  # of held-out texts for an estimate on the way; the last one takes all
CLIP = 1.0  # most that the gradient's norm may be
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01
_MODEL, _BEST, _OPTIMIZER, _RNG = "model.", "best.", "optimizer.", "rng"


class Learner(Protocol):
    """A drafter that learns."""

    micro_tokens: int  # most tokens of a micro-batch

    @property
    def model(self) -> torch.nn.Module:
        """What is trained: its parameters that require a gradient."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the loss over `batch.pairs(0, 0)`, a scalar."""

    def right(self, batch: Batch) -> torch.Tensor:
        """Whether the k-th drafted token is the text's [n, K]."""


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a learner was worth after `step` steps: `loss` of training since the estimate before, held-out figures."""

    step: int
    epoch: float
    loss: float
    held_out_loss: float
    tau: float
    acceptance: list[float]


class State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a run is. `fingerprint`: what it is a run of.

    `cursor`: steps of the epoch that are done; `spent`: seconds, of a budget of `minutes`; `mark`: estimates that were
    due; `lost`: loss summed over the `lost_steps` since the last; `unimproved`: evaluations since the best.
    """

    fingerprint: str
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    spent: float = 0.0
    minutes: float = 0.0
    mark: int = 0
    lost: float = 0.0
    lost_steps: int = 0
    unimproved: int = 0
    ended: bool = False
    history: list[Estimate] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a run goes: a budget of `steps`, or of `minutes`; `checkpoint_seconds` between checkpoints."""

    steps: int | None
    minutes: float
    learning_rate: float
    step_tokens: int
    seed: int
    checkpoint_seconds: float

    def rate(self, done: float) -> float:
        """The learning rate when `done` (0 to 1) of the budget is spent: a linear rise, then a cosine to zero."""
        return self.learning_rate * min(max(done, LEAST) / WARMUP, 1.0) * 0.5 * (1 + math.cos(math.pi * done))


class Loop:
    """One run of `learner` on `rows`. What outlives a kill lies in `checkpoint`, what it is a run of, in `fingerprint`.

    `columns`: which of the features the learner reads. Raises `RequestError` when there is nothing to learn from or to
    be estimated on, or the checkpoint is of another run.
    """

    def __init__(
        self,
        learner: Learner,
        rows: Sequence[TextRow],
        held_out: Sequence[TextRow],
        columns: torch.Tensor,
        schedule: Schedule,
        checkpoint: Path,
        fingerprint: str,
        progress: TrainProgress,
    ) -> None:
        if not rows or not held_out:
            raise RequestError("the data has no text to train on, or none that is held out: write more with --tokens")
        self._learner, self._rows, self._held_out = learner, rows, held_out
        self._estimated = _first(held_out, ESTIMATE_TOKENS)
        self._columns, self._schedule, self._progress = columns, schedule, progress
        self._checkpoint = checkpoint
        self._parameters = {
            name: parameter for name, parameter in learner.model.named_parameters() if parameter.requires_grad
        }
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=0.0, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._best = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._begun = time.monotonic()
        torch.manual_seed(schedule.seed)
        self.state = State(fingerprint=fingerprint, minutes=schedule.minutes)
        if checkpoint.exists():
            self._resume(fingerprint)

    def run(self) -> list[Estimate]:
        """Train until the budget is spent or nothing improves; leave the best weights in the model."""
        state, steps, saved = self.state, self._epoch(), time.monotonic()
        self._learner.model.train()
        with _repeatable(self._device):
            if not state.history:
                self._estimate(steps)
            while not state.ended:
                if state.cursor == len(steps):
                    state.epoch, state.cursor = state.epoch + 1, 0
                    steps = self._epoch()
                self._step(steps[state.cursor])
                state.step, state.cursor = state.step + 1, state.cursor + 1
                done = self._done()
                if done >= 1 or (int(done * EVALUATIONS) > state.mark and self._can_afford_an_estimate()):
                    state.mark = int(done * EVALUATIONS)
                    self._estimate(steps)
                    state.ended = done >= 1 or state.unimproved >= PATIENCE
                if state.ended or time.monotonic() - saved >= self._schedule.checkpoint_seconds:
                    self._save()
                    saved = time.monotonic()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._best[name])
        return state.history

    def measure(self, rows: Sequence[TextRow]) -> tuple[Figures, float]:
        """Figures of the learner on `rows`, and its mean loss there."""
        figures, loss = Figures(), 0.0
        self._learner.model.eval()
        with torch.no_grad():
            for batch in self.batches(rows):
                figures.add(self._learner.right(batch))
                loss += float(self._learner.loss(batch))
        self._learner.model.train()
        return figures, loss / positions(rows)

    def batches(self, rows: Sequence[TextRow]) -> Iterator[Batch]:
        """All of `rows` once, side by side."""
        for group in micro_batches([len(row.tokens) for row in rows], self._learner.micro_tokens):
            yield collate([rows[index] for index in group], self._columns, self._device)

    def _epoch(self) -> list[Step]:
        lengths = [len(row.tokens) for row in self._rows]
        schedule, state = self._schedule, self.state
        return epoch_steps(lengths, schedule.step_tokens, self._learner.micro_tokens, schedule.seed, state.epoch)

    def _step(self, groups: Step) -> None:
        """One optimizer step over micro-batches, each position of the step with the same weight."""
        rate = self._schedule.rate(self._done())
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        count = positions([self._rows[index] for group in groups for index in group])
        lost = 0.0
        for rows in groups:
            batch = collate([self._rows[index] for index in rows], self._columns, self._device)
            loss = self._learner.loss(batch) / count
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation there
            lost += float(loss.detach())
        if not math.isfinite(lost):
            raise ExportError(f"the loss is {lost} at step {self.state.step}: choose a smaller --learning-rate")
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.state.lost += lost
        self.state.lost_steps += 1
        self._progress.advance(self._done(), 1.0, {"loss": lost})

    def _done(self) -> float:
        """The share of the budget that is spent."""
        if self._schedule.steps is not None:
            return min(self.state.step / self._schedule.steps, 1.0)
        return min((self.state.spent + time.monotonic() - self._begun) / 60 / self.state.minutes, 1.0)

    def _can_afford_an_estimate(self) -> bool:
        """Whether enough was learned since the last one; without this, short runs do little else."""
        learned = self.state.lost_steps * self._schedule.step_tokens
        return sum(len(row.tokens) for row in self._estimated) <= ESTIMATE_SHARE * learned

    def _estimate(self, steps: Sequence[Step]) -> None:
        """Measure on a fixed part of the held-out texts; keep the weights if none were better."""
        state = self.state
        figures, loss = self.measure(self._estimated)
        estimate = Estimate(
            step=state.step,
            epoch=state.epoch + state.cursor / len(steps),
            loss=state.lost / max(state.lost_steps, 1),
            held_out_loss=loss,
            tau=figures.tau,
            acceptance=figures.acceptance,
        )
        best = max(state.history, key=_worth, default=None)
        least = min((earlier.held_out_loss for earlier in state.history), default=math.inf)
        if best is None or _worth(estimate) > _worth(best):
            self._best = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            state.unimproved = 0
        else:
            state.unimproved = 0 if loss < least else state.unimproved + 1
        state.history.append(estimate)
        state.lost, state.lost_steps = 0.0, 0
        self._progress.advance(self._done(), 1.0, {"held-out loss": loss, "τ": figures.tau})

    def _save(self) -> None:
        now = time.monotonic()
        self.state.spent, self._begun = self.state.spent + now - self._begun, now
        tensors = {_RNG: torch.get_rng_state()}
        tensors |= {f"{_MODEL}{name}": parameter for name, parameter in self._parameters.items()}
        tensors |= {f"{_BEST}{name}": parameter for name, parameter in self._best.items()}
        for index, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{_OPTIMIZER}{index}.{name}": value for name, value in moments.items()}
        save_state(self._checkpoint, self.state, tensors)

    def _resume(self, fingerprint: str) -> None:
        state, tensors = load_state(self._checkpoint, State)
        if state.fingerprint != fingerprint:
            raise RequestError(f"{self._checkpoint} is of a run with other options or data: --force trains anew")
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_OPTIMIZER):
                index, _, key = name.removeprefix(_OPTIMIZER).partition(".")
                moments.setdefault(int(index), {})[key] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"{_MODEL}{name}"])
                self._best[name].copy_(tensors[f"{_BEST}{name}"])
        torch.set_rng_state(tensors[_RNG])
        self.state = state
        self._progress.note(f"going on from step {state.step} of {self._checkpoint}")


def _worth(estimate: Estimate) -> tuple[float, float]:
    """What weights are chosen by: τ, then the loss."""
    return estimate.tau, -estimate.held_out_loss


def _first(rows: Sequence[TextRow], tokens: int) -> list[TextRow]:
    """The first of `rows` that together have about `tokens` tokens; at least one."""
    chosen: list[TextRow] = []
    for row in rows:
        if tokens <= 0:
            break
        chosen.append(row)
        tokens -= len(row.tokens)
    return chosen


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """While open, the CPU's operators give the same bits every time."""
    options: Any = torch.utils.deterministic  # torch has no annotation there
    before = torch.are_deterministic_algorithms_enabled(), options.fill_uninitialized_memory
    torch.use_deterministic_algorithms(device.type == "cpu" or before[0])
    options.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        options.fill_uninitialized_memory = before[1]

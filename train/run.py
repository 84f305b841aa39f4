"""A training from end to end: target → data → drafter → loop → a folder that `specdec-export` takes.

The folder gets the drafter's own files and `training.json`, which says what made it and how good it is; while a run is
on its way it holds a checkpoint, from which the same command goes on. This module knows the order; it parses no command
line and prints nothing.
"""

import hashlib
import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from specdec.engines.contract import tap_columns
from specdec.engines.errors import RequestError
from specdec.export.calibrate import read_prompts
from specdec.export.eagle_files import WEIGHTS
from specdec.export.families import check_supported, text_config
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.sources import Checkpoint, open_checkpoint
from specdec.export.taps import FINAL
from specdec.train.batches import learnable
from specdec.train.beginning import chosen_taps, new_learner, read_source
from specdec.train.data import RECORD, Data, TextRow, prompts_digest
from specdec.train.distill import choose_layers
from specdec.train.loop import Estimate, Loop, Schedule
from specdec.train.options import DEFAULT_TOKENS, Method, TrainOptions, TrainProgress
from specdec.train.target import Target
from specdec.train.writing import make_data

COMPLETE = "complete"  # a file of a data folder that holds what was asked for
TRAINING, CHECKPOINT = "training.json", "checkpoint.safetensors"
_CHECKED, _LEAST = 8, 0.2  # held-out texts that are looked at, and the share of tokens that must be the target's
DATA_SHARE = 0.5  # of the minutes, at most, goes into data
_TOOLS = ("specdec", "torch", "transformers")
_NOT_OF_THE_RUN = (
    "model",
    "output",
    "data",
    "prompts",
    "force",
    "checkpoint_minutes",
    "tokens",
    "trust_remote_code",
    "init",
)


class DataFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was learned from: tokens in all, rows of either share, and where the texts came from (`DataRecord`)."""

    tokens: int
    train_rows: int
    held_out_rows: int
    taps: tuple[str, ...]
    prompts: str
    seed: int


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`training.json`. `tau`, `acceptance`, `held_out_loss`: of the weights as written, on all held-out texts.

    `acceptance`: P(drafted token k is right | those before it are). `history`: estimates on the way. `seconds`: spent
    in the loop. `parameters`: how many were trained.
    """

    method: Method
    target: str
    options: dict[str, Any]
    data: DataFigures
    parameters: int
    steps: int
    seconds: float
    tau: float
    acceptance: list[float]
    held_out_loss: float
    history: list[Estimate]
    tools: dict[str, str]


def train(options: TrainOptions, progress: TrainProgress | None = None) -> Training:
    """Train the drafter of `options` and write it to `options.output`; return what `training.json` says.

    Raises `RequestError` (options, data) or `ExportError` (target). Interrupted, the folder keeps its checkpoint.
    """
    progress = progress or TrainProgress()
    _check_output(options.output, force=options.force)
    progress.stage("target")
    checkpoint = open_checkpoint(options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)
    check_supported(checkpoint.config)
    source = None if options.init is None else read_source(options.init, checkpoint)
    taps = chosen_taps(options, checkpoint, source)
    _check_device(options.device)
    if options.method == "distill":  # what is wrong is said before the work
        choose_layers(options.layers, options.keep, text_config(checkpoint.config).num_hidden_layers)
    begun = time.monotonic()
    data = _data(options, checkpoint, taps, progress)
    spent = (time.monotonic() - begun) / 60
    rows = [row for row in data.rows("train") if learnable(row)]
    held_out = [row for row in data.rows("held-out") if learnable(row)]
    torch.manual_seed(options.seed)
    target, model = _target(options, checkpoint)
    _check_states(target, held_out, data)
    columns = torch.from_numpy(tap_columns(data.taps, data.record.hidden_size, taps))
    learner = new_learner(options, checkpoint, target, model, rows, data.vocab_size, taps, columns, source)
    del model  # its layers are not needed any more
    options.output.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(
        steps=options.steps,
        minutes=max(options.minutes - spent, options.minutes * (1 - DATA_SHARE)),
        learning_rate=options.learning_rate,
        step_tokens=options.step_tokens,
        seed=options.seed,
        checkpoint_seconds=60 * options.checkpoint_minutes,
    )
    stored = options.output / CHECKPOINT
    progress.stage("training")
    loop = Loop(learner, rows, held_out, columns, schedule, stored, _fingerprint(options, checkpoint, data), progress)
    history = loop.run()
    progress.stage("held-out texts")
    own = _as_written(learner.model)
    figures, loss = loop.measure(held_out)
    learner.write(options.output, loop.batches(held_out))
    training = Training(
        method=options.method,
        target=checkpoint.name,
        options=_of_the_run(options),
        data=DataFigures(
            tokens=data.tokens,
            train_rows=len(rows),
            held_out_rows=len(held_out),
            taps=data.taps,
            prompts=data.record.prompts,
            seed=data.record.seed,
        ),
        parameters=sum(parameter.numel() for parameter in own),
        steps=loop.state.step,
        seconds=round(loop.state.spent, 1),
        tau=figures.tau,
        acceptance=figures.acceptance,
        held_out_loss=loss,
        history=history,
        tools={name: importlib.metadata.version(name) for name in _TOOLS},
    )
    encoded = msgspec.json.format(msgspec.json.encode(training), indent=2)
    (options.output / TRAINING).write_bytes(encoded + b"\n")
    stored.unlink()
    return training


def _as_written(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Give `model` the weights that are written: float16's, without parametrizations. Returns those trained."""
    for module in list(model.modules()):
        if is_parametrized(module, "weight"):
            remove_parametrizations(module, "weight")
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in own:
            parameter.copy_(parameter.half().float())
    return own


def _check_output(output: Path, *, force: bool) -> None:
    """Raise `RequestError` unless `output` is free, or a run that can be gone on with; with `force`, begin anew."""
    if force:
        for name in (CHECKPOINT, TRAINING):
            (output / name).unlink(missing_ok=True)
    elif (output / TRAINING).exists():
        raise RequestError(f"{output} is a drafter that was trained: choose another folder, or --force to train anew")
    elif output.exists() and not (output / CHECKPOINT).exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(
            f"{output} exists and is no training of ours: choose another folder, or --force to write there"
        )


def _data(options: TrainOptions, checkpoint: Checkpoint, taps: Sequence[str], progress: TrainProgress) -> Data:
    """The texts: those that are there, and what the target has yet to write."""
    folder, bundle = options.data_folder, options.data_folder / "target"
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    there = Data(folder) if (folder / RECORD).exists() else None
    if there is not None:
        _check_data(there, checkpoint, taps)
        if prompts is not None and prompts_digest(prompts) != there.record.prompts:
            raise RequestError(f"{folder} was written from other prompts: choose another folder with --data")
    whole = (folder / COMPLETE).exists() or not bundle.exists()
    if there is not None and (there.tokens >= options.tokens if options.tokens else whole):
        return there
    progress.stage("data")
    if not bundle.exists():  # what is added has the hidden states that the rest has
        states = there.taps if there else tuple(sorted(set(taps), key=lambda tap: (tap == FINAL, len(tap), tap)))
        export_bundle(
            ExportOptions(
                model=options.model,
                output=bundle,
                drafters=("none",),
                taps=states,
                revision=options.revision,
                trust_remote_code=options.trust_remote_code,
            )
        )
    data = make_data(
        bundle,
        folder,
        tokens=options.tokens or DEFAULT_TOKENS,
        minutes=None if options.tokens else options.minutes * DATA_SHARE,
        prompts=prompts,
        seed=options.seed,
        at_most=options.tokens is None,
        progress=lambda done, total: progress.advance(done, total),
    )
    (folder / COMPLETE).touch()
    return data


def _check_device(name: str) -> None:
    """Raise `RequestError` for a device that torch does not have here."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as exc:
        raise RequestError(f"--device {name} is not to be had: {str(exc).splitlines()[0]}") from exc


def _check_data(data: Data, checkpoint: Checkpoint, taps: Sequence[str]) -> None:
    """Raise `RequestError` unless the data is of such a target and has the hidden states that are needed."""
    size = text_config(checkpoint.config).hidden_size
    if data.record.hidden_size != size:
        raise RequestError(f"the data is of a target of hidden size {data.record.hidden_size}, this one's is {size}")
    if missing := [tap for tap in taps if tap not in data.taps]:
        raise RequestError(f"the data has no hidden states at {missing[0]}, only at {', '.join(data.taps)}: make other "
                           "data, or choose among them with --taps")  # fmt: skip


def _check_states(target: Target, rows: Sequence[TextRow], data: Data) -> None:
    """Raise `RequestError` unless the target would have said, most of the time, what the data's texts say."""
    begin = data.taps.index(FINAL) * target.hidden_size
    shares = [
        target.agreement(row, torch.from_numpy(row.features[:, begin : begin + target.hidden_size]).float())
        for row in rows[:_CHECKED]
    ]
    if shares and (share := sum(shares) / len(shares)) < _LEAST:
        raise RequestError(f"the data is of another target: this one would have said {share:.0%} of its tokens")


def _target(options: TrainOptions, checkpoint: Checkpoint) -> tuple[Target, Any]:
    """The target's ends, and the whole model."""
    model: Any = checkpoint.load(torch.float32)
    return Target(model, torch.device(options.device)), model


def _of_the_run(options: TrainOptions) -> dict[str, Any]:
    """The options that decide what is trained, without paths; of `init`, the weights' SHA-256."""
    chosen = {name: value for name, value in asdict(options).items() if name not in _NOT_OF_THE_RUN}
    digest = options.init and hashlib.sha256((options.init / WEIGHTS).read_bytes()).hexdigest()
    return {**chosen, "init": digest}


def _fingerprint(options: TrainOptions, checkpoint: Checkpoint, data: Data) -> str:
    """What a checkpoint is a run of: the options that decide, the target's shape, the data, the number of threads."""
    parts = [
        msgspec.json.encode(_of_the_run(options)),
        checkpoint.config.to_json_string().encode(),
        msgspec.json.encode(data.record),
        str((data.tokens, torch.get_num_threads())).encode(),
    ]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()

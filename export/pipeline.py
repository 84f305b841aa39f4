"""The export from end to end: checkpoint → traced graph → weights on disk → gates → bundle.

`export_bundle` reads as the list of stages; each is a call into the module that knows how. This module knows the order,
the names inside a bundle, and what memory and disk an export needs; it parses no command line and prints nothing.
"""

import gc
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from specdec.engines.base import Engine
from specdec.engines.contract import CONTRACT_VERSION, ITEMSIZE, Dtype, ModelSpec
from specdec.engines.errors import RequestError
from specdec.engines.invariance import PROBE_TEXT
from specdec.engines.manifest import (
    SCHEMA_VERSION,
    Limits,
    Manifest,
    Model,
    ModelDrafter,
    NgramDrafter,
    Source,
    Variant,
)
from specdec.engines.registry import EngineConfig, open_engine
from specdec.export.bundle import Staging, check_disk, check_memory, check_output
from specdec.export.check import probe_tokens, reference, run_gates
from specdec.export.families import check_supported, text_config
from specdec.export.options import PRECISIONS, ExportOptions, Progress, draft_source
from specdec.export.pair import check_pair
from specdec.export.sources import Checkpoint, open_checkpoint
from specdec.export.tokenizer import TokenizerFiles, read_tokenizer
from specdec.export.trace import TORCH_DTYPES, model_spec, trace
from specdec.export.weights import graph_bytes, write_graph

DEFAULT_MAX_LENGTH = 8192  # tokens of a row unless --max-length says more: caches grow to what is asked for
SMALL_FILES = 64 * 2**20  # bytes: graph, tokenizer and manifest, at most
WORKSPACE = 9 * 2**27  # bytes beside the weights: libraries, a large vocabulary, reference logits, caches
# What the engine holds at its peak, in sizes of the graph's data (measured): ONNX Runtime's CPU provider has no float16
# kernels and keeps what it loads a second time, in float32.
ENGINE_PEAK = {"float32": 1.3, "float16": 2.3}
TOOLS = ("specdec", "torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One model of the bundle on its way: `role` names its folder and its stages."""

    role: str
    checkpoint: Checkpoint
    tokenizer: TokenizerFiles
    precision: str

    @property
    def dtype(self) -> Dtype:
        return PRECISIONS[self.precision]

    @property
    def spec(self) -> ModelSpec:
        config = self.checkpoint.config
        known = min(self.tokenizer.vocab_size, text_config(config).vocab_size)
        return model_spec(config, known, self.dtype)


def export_bundle(options: ExportOptions, progress: Progress | None = None) -> Manifest:
    """Export `options.model` and its drafters to `options.output`; return the manifest that was written.

    Raises `ExportError` or one of its kinds (source, unsupported model, pair, resource, gate), or `RequestError` for a
    limit that the model does not have; then, and on any interruption, no bundle is left.
    """
    progress = progress or Progress()
    check_output(options.output.expanduser().absolute(), force=options.force)
    target, draft, shared = _resolve(options, progress)
    limits = _limits(options, target.spec, progress)
    jobs = [job for job in (target, draft) if job is not None]
    graphs = _trace_all(jobs, progress)
    check_disk(options.output, sum(map(graph_bytes, graphs)) + SMALL_FILES)
    check_memory(max(memory_need(job.spec, graph_bytes(graph)) for job, graph in zip(jobs, graphs, strict=True)))
    with Staging(options.output, force=options.force) as staging:
        models = [_export_model(job, graph, staging.path, progress) for job, graph in zip(jobs, graphs, strict=True)]
        target.tokenizer.write(staging.path)
        drafters: dict[str, NgramDrafter | ModelDrafter] = {}
        if "ngram" in options.drafters:
            drafters["ngram"] = NgramDrafter()
        if draft_source(options.drafters) is not None:
            drafters["model"] = ModelDrafter(model=models[-1], shared_vocab=shared)
        progress.stage("bundle")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            contract_version=CONTRACT_VERSION,
            source=_source(target.checkpoint),
            tokenizer=target.tokenizer.record,
            target=models[0],
            drafters=drafters,
            limits=limits,
            tools={name: importlib.metadata.version(name) for name in TOOLS},
            files=staging.hash_files(),
        )
        staging.commit(manifest)
    return manifest


def memory_need(spec: ModelSpec, weights: int) -> int:
    """Bytes that exporting a model with `weights` bytes of parameters takes at its peak.

    PyTorch holds them first, with two copies of the largest one while a GGUF is read; when it is gone, the engine does.
    """
    largest = spec.logits_size * spec.hidden_size * ITEMSIZE[spec.dtype]
    return max(weights + 2 * largest, int(ENGINE_PEAK[spec.dtype] * weights)) + WORKSPACE


def _resolve(options: ExportOptions, progress: Progress) -> tuple[_Job, _Job | None, int]:
    """Open and check the checkpoints; return target, draft (None: none, or the target itself) and the shared ids."""
    target = _open_job("target", options.model, options.precision, options, progress, revision=options.revision)
    source = draft_source(options.drafters)
    if source is None:
        return target, None, 0
    precision = options.draft_precision or options.precision
    if source == options.model:  # the target as its own draft: nothing to read, and at equal precision nothing to write
        draft = replace(target, role="drafter", precision=precision)
    else:
        draft = _open_job("drafter", source, precision, options, progress, revision=None)
    shared = min(check_pair(target.tokenizer, draft.tokenizer), target.spec.vocab_size, draft.spec.vocab_size)
    if draft.spec.max_length < target.spec.max_length:
        progress.note(
            f"the draft's context is {draft.spec.max_length} tokens, the target's {target.spec.max_length}: "
            "beyond it, decoding goes on without the draft model"
        )
    same = draft.checkpoint.path == target.checkpoint.path and draft.precision == target.precision
    return target, None if same else draft, shared


def _open_job(
    role: str, model: str, precision: str, options: ExportOptions, progress: Progress, *, revision: str | None
) -> _Job:
    progress.stage(f"{role}: checkpoint")
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=options.trust_remote_code)
    check_supported(checkpoint.config)
    progress.stage(f"{role}: tokenizer")
    return _Job(role=role, checkpoint=checkpoint, tokenizer=read_tokenizer(checkpoint), precision=precision)


def _limits(options: ExportOptions, spec: ModelSpec, progress: Progress) -> Limits:
    longest = options.max_length or min(spec.max_length, DEFAULT_MAX_LENGTH)
    if longest > spec.max_length:
        raise RequestError(f"--max-length {longest} is beyond the model's own {spec.max_length} tokens")
    if options.max_length is None and longest < spec.max_length:
        progress.note(f"max length is {longest} tokens of the model's {spec.max_length}; --max-length sets another")
    return Limits(max_batch=options.max_batch, max_length=longest, max_tree=options.max_tree)


def _trace_all(jobs: Sequence[_Job], progress: Progress) -> list[ir.Model]:
    graphs = []
    for job in jobs:
        progress.stage(f"{job.role}: trace")
        graphs.append(trace(job.checkpoint.config, job.dtype))
    return graphs


def _export_model(job: _Job, graph: ir.Model, bundle: Path, progress: Progress) -> Model:
    """Write one model into the bundle and pass it through the gates; its PyTorch weights are gone by then."""
    spec, config = job.spec, text_config(job.checkpoint.config)
    text = job.tokenizer.backend().encode(PROBE_TEXT).ids
    tokens = probe_tokens(text, spec, getattr(config, "sliding_window", None))
    name = f"{job.role}/{job.precision}/model.onnx"
    (bundle / name).parent.mkdir(parents=True)

    progress.stage(f"{job.role}: weights")
    model = job.checkpoint.load(TORCH_DTYPES[job.dtype])
    progress.stage(f"{job.role}: reference")
    expected = reference(model, tokens, spec.vocab_size)
    progress.stage(f"{job.role}: write")
    write_graph(graph, model.state_dict(), bundle / name, progress.advance)
    del model
    gc.collect()

    progress.stage(f"{job.role}: gates")

    def opener(threads: int) -> Engine:
        return open_engine(bundle / name, spec, EngineConfig(threads=threads))

    parity, invariance = run_gates(opener, expected, tokens)
    variant = Variant(graph=name, precision=job.precision, parity=parity, invariance=invariance)
    return Model(spec=spec, variants={job.precision: variant})


def _source(checkpoint: Checkpoint) -> Source:
    return Source(name=checkpoint.name, format=checkpoint.format, family=text_config(checkpoint.config).model_type)

"""The export from end to end: checkpoint → traced graph → quantized weights → files → gates → plans → bundle.

`export_bundle` reads as the list of stages; each is a call into the module that knows how. This module knows the order,
the names inside a bundle, and what memory and disk an export needs; it parses no command line and prints nothing.

Length: the stages are one story, told in one place; what each takes in memory and on disk belongs to it.
"""

import gc
import importlib.metadata
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from msgspec.structs import replace as replace_fields

from specdec.engines.base import Engine
from specdec.engines.contract import CONTRACT_VERSION, ITEMSIZE, FloatArray, ModelSpec
from specdec.engines.damage import measure_damage
from specdec.engines.errors import RequestError
from specdec.engines.invariance import PROBE_TEXT, run_invariance
from specdec.engines.manifest import (
    SCHEMA_VERSION,
    Drafter,
    LayerSkipDrafter,
    Limits,
    Manifest,
    Model,
    ModelDrafter,
    NgramDrafter,
    Plan,
    Source,
    Variant,
)
from specdec.engines.prompts import PROMPTS
from specdec.engines.registry import EngineConfig, open_engine
from specdec.engines.trt_library import load_library
from specdec.export.bundle import Staging, check_disk, check_memory, check_output
from specdec.export.calibrate import TEXTS, read_prompts
from specdec.export.check import Reference, check_parity, probe_tokens, reference, reference_logits, run_gates
from specdec.export.eagle import EagleJob, Target
from specdec.export.families import check_supported, text_config
from specdec.export.gguf_grids import read_grids
from specdec.export.grid import Grid
from specdec.export.layerskip import first_layers, shallow
from specdec.export.lower_ort import lower_for_ort
from specdec.export.medusa import export_medusa
from specdec.export.medusa_model import MedusaModel, read_medusa
from specdec.export.options import (
    ExportOptions,
    Progress,
    draft_source,
    eagle_source,
    medusa_source,
    skip_depths,
)
from specdec.export.pair import check_pair
from specdec.export.precision import check_keep, dequantize, prepare, quantize_graph, without_rounding
from specdec.export.recipes import ORT, TENSORRT, Recipe, find_recipe
from specdec.export.sources import Checkpoint, open_checkpoint
from specdec.export.taps import FINAL, add_taps, check_taps
from specdec.export.tensorrt import build_plans, known_architectures
from specdec.export.tokenizer import TokenizerFiles, read_tokenizer
from specdec.export.trace import TORCH_DTYPES, model_spec, trace
from specdec.export.weights import Lender, graph_bytes, save_graph, write_graph

DEFAULT_MAX_LENGTH = 8192  # tokens of a row unless --max-length says more: caches grow to what is asked for
SMALL_FILES = 64 * 2**20  # bytes: graph, tokenizer and manifest, at most
WORKSPACE = 9 * 2**27  # bytes beside the weights: libraries, a large vocabulary, reference logits, caches
# What the engine holds at its peak, in sizes of the graph's data (measured): ONNX Runtime's CPU provider has no float16
# kernels and keeps what it loads a second time, in float32; a bfloat16 model runs as its float32 twin.
ENGINE_PEAK = {"float32": 1.3, "float16": 2.3, "bfloat16": 2.6}
TOOLS = ("specdec", "torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One model of the bundle on its way: `role` names its folder and its stages.

    `depths`: how many of its first layers draft for it, for every `layerskip` drafter. `eagle`: the drafter that reads
    its hidden states. `taps`: hidden states that its graph hands out.
    """

    role: str
    checkpoint: Checkpoint
    tokenizer: TokenizerFiles
    recipe: Recipe
    depths: tuple[int, ...] = ()
    eagle: EagleJob | None = None
    taps: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        return self.recipe.name

    @property
    def spec(self) -> ModelSpec:
        config = self.checkpoint.config
        known = min(self.tokenizer.vocab_size, text_config(config).vocab_size)
        return replace_fields(model_spec(config, known, self.recipe.dtype), taps=self.taps)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text that the model knows, cut to its context."""
        backend, spec = self.tokenizer.backend(), self.spec
        encoded = (backend.encode(text).ids for text in texts)
        return [[token for token in ids if token < spec.vocab_size][: spec.max_length] for ids in encoded]


def export_bundle(options: ExportOptions, progress: Progress | None = None) -> Manifest:
    """Export `options.model` and its drafters to `options.output`; return the manifest that was written.

    Raises `ExportError` or one of its kinds (source, unsupported model, pair, resource, gate), or `RequestError` for a
    limit that the model does not have; then, and on any interruption, no bundle is left.
    """
    progress = progress or Progress()
    check_output(options.output.expanduser().absolute(), force=options.force)
    _calibration(options)
    for backend in TENSORRT:
        if backend in options.backends:  # what is missing is said before the work
            known_architectures(load_library(backend), backend, options.archs)
    target, draft, shared = _resolve(options, progress)
    heads = _read_heads(options, target)
    extra = heads.nbytes if heads is not None else 0
    limits = _limits(options, target.spec, progress)
    jobs = [job for job in (target, draft) if job is not None]
    graphs = _trace_all(jobs, progress)
    check_keep([graph for job, graph in zip(jobs, graphs, strict=True) if job.recipe.weights], options.keep)
    check_disk(options.output, sum(map(_disk_need, jobs, graphs)) + extra + SMALL_FILES)
    check_memory(
        extra
        + max(
            memory_need(job.spec, graph_bytes(graph), quantized=job.recipe.weights is not None)
            for job, graph in zip(jobs, graphs, strict=True)
        )
    )
    with Staging(options.output, force=options.force) as staging:
        exported = [
            _export_model(job, graph, staging.path, options, limits, progress)
            for job, graph in zip(jobs, graphs, strict=True)
        ]
        target.tokenizer.write(staging.path)
        drafters: dict[str, Drafter] = {}
        if "ngram" in options.drafters:
            drafters["ngram"] = NgramDrafter()
        if draft_source(options.drafters) is not None:
            drafters["model"] = ModelDrafter(model=exported[-1][0], shared_vocab=shared)
        drafters |= exported[0][1]
        if heads is not None:
            progress.stage("medusa")
            words = target.encode([PROBE_TEXT])[0]
            drafters["medusa"] = export_medusa(heads, exported[0][0], target.recipe, staging.path, words)
        progress.stage("bundle")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            contract_version=CONTRACT_VERSION,
            source=_source(target.checkpoint),
            tokenizer=target.tokenizer.record,
            target=exported[0][0],
            drafters=drafters,
            limits=limits,
            tools={name: importlib.metadata.version(name) for name in TOOLS},
            files=staging.hash_files(),
        )
        staging.commit(manifest)
    return manifest


def memory_need(spec: ModelSpec, weights: int, *, quantized: bool = False) -> int:
    """Bytes that exporting a model with `weights` bytes of parameters takes at its peak.

    PyTorch holds them first, with two copies of the largest one while a GGUF is read; when it is gone, the engine does.
    Quantization takes float32, the levels (one byte each) and, while outliers are folded, most weights twice.
    """
    itemsize = ITEMSIZE[spec.dtype]
    largest = spec.logits_size * spec.hidden_size * itemsize
    loaded = weights // itemsize * (2 * 4 + 1) if quantized else weights + 2 * largest
    return max(loaded, int(ENGINE_PEAK[spec.dtype] * weights)) + WORKSPACE


def _resolve(options: ExportOptions, progress: Progress) -> tuple[_Job, _Job | None, int]:
    """Open and check the checkpoints; return target, draft (None: none, or the target itself) and the shared ids."""
    target = _open_job("target", options.model, options.precision, options, progress, revision=options.revision)
    taps = options.taps
    if medusa_source(options.drafters) is not None and FINAL not in taps:
        taps = (*taps, FINAL)
    target = replace(target, depths=skip_depths(options.drafters), taps=taps)
    for depth in target.depths:
        if depth >= target.spec.num_layers:
            raise RequestError(
                f"drafter layerskip:{depth} has to skip a layer: the model has {target.spec.num_layers}, "
                f"choose 1 to {target.spec.num_layers - 1}"
            )
    check_taps(target.taps, target.spec.num_layers)
    if (folder := eagle_source(options.drafters)) is not None:
        progress.stage("eagle: checkpoint")
        eagle = EagleJob.open(folder, target.checkpoint.config, target.recipe, options.draft_precision)
        own = eagle.config.llama.max_position_embeddings
        if own < target.spec.max_length:
            progress.note(
                f"the drafter's context is {own} tokens, the target's {target.spec.max_length}: "
                "beyond it, decoding goes on without the drafter"
            )
        more = (tap for tap in eagle.config.taps if tap not in target.taps)
        target = replace(target, eagle=eagle, taps=(*target.taps, *more))
    source = draft_source(options.drafters)
    if source is None:
        return target, None, 0
    precision = options.draft_precision or options.precision
    if source == options.model:  # the target as its own draft: nothing to read, and at equal precision nothing to write
        draft = replace(
            target, role="drafter", depths=(), eagle=None, taps=(), recipe=find_recipe(precision, options.backends)
        )
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


def _read_heads(options: ExportOptions, target: _Job) -> MedusaModel | None:
    folder = medusa_source(options.drafters)
    return None if folder is None else read_medusa(folder, target.checkpoint.config)


def _open_job(
    role: str, model: str, precision: str, options: ExportOptions, progress: Progress, *, revision: str | None
) -> _Job:
    progress.stage(f"{role}: checkpoint")
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=options.trust_remote_code)
    check_supported(checkpoint.config)
    progress.stage(f"{role}: tokenizer")
    recipe = find_recipe(precision, options.backends)
    return _Job(role=role, checkpoint=checkpoint, tokenizer=read_tokenizer(checkpoint), recipe=recipe)


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
        graphs.append(trace(job.checkpoint.config, job.recipe.dtype))
    return graphs


def _export_model(
    job: _Job, graph: ir.Model, bundle: Path, options: ExportOptions, limits: Limits, progress: Progress
) -> tuple[Model, dict[str, Drafter]]:
    """Write one model into the bundle and pass it through the gates; its PyTorch weights are gone by then.

    Returns it, and the drafters that were cut out of it or read its states.
    """
    spec, recipe, quantized = job.spec, job.recipe, job.recipe.weights is not None
    window = getattr(text_config(job.checkpoint.config), "sliding_window", None)
    tokens = probe_tokens(job.encode([PROBE_TEXT])[0], spec, window)
    name = f"{job.role}/{job.precision}/model.onnx"
    path = bundle / name
    path.parent.mkdir(parents=True)

    progress.stage(f"{job.role}: weights")
    model: Any = job.checkpoint.load(torch.float32 if quantized else TORCH_DTYPES[recipe.dtype])
    with tempfile.TemporaryDirectory(prefix="reference-", dir=bundle) as scratch:
        grids: dict[str, Grid] = {}
        held_out: Iterable[tuple[list[int], FloatArray]] = ()
        if quantized:
            progress.stage(f"{job.role}: quantize")
            held_out = reference_logits(model, job.encode([prompt.text for prompt in PROMPTS]), spec, Path(scratch))
            grids = _quantize(job, graph, model, options)
        progress.stage(f"{job.role}: reference")
        expected = reference(model.float() if recipe.dtype == "bfloat16" else model, tokens, spec.vocab_size)
        shallows: dict[int, Reference] = {}
        for depth in job.depths:
            with shallow(model, depth) as part:
                shallows[depth] = reference(part, tokens, spec.vocab_size)
        progress.stage(f"{job.role}: write")
        plans: dict[str, Plan] = {}
        if set(options.backends) & set(TENSORRT):
            write_graph(graph, model.state_dict(), path, progress.advance, grids)
            plans = _compile(job, bundle, name, options, limits, progress)
        if ORT[0] in options.backends:
            lower_for_ort(add_taps(graph, spec), spec)
            write_graph(graph, model.state_dict(), path, progress.advance, grids)
        oracle, shape = path, spec
        if recipe.dtype == "bfloat16":  # ONNX Runtime's CPU has no kernels: the same weights run in float32
            oracle, shape = Path(scratch) / "model.onnx", model_spec(job.checkpoint.config, spec.vocab_size, "float32")
            write_graph(trace(job.checkpoint.config, "float32"), model.state_dict(), oracle)
        lent = Target.of(model, Lender(graph, f"{path.name}.data"), grids) if job.eagle is not None else None
        del model, grids
        gc.collect()

        def opener(threads: int) -> Engine:
            return open_engine(oracle, shape, EngineConfig(threads=threads))

        progress.stage(f"{job.role}: gates")
        damage = None
        if quantized:
            with closing(_exact_twin(graph, graph, path, spec)) as engine:
                parity = check_parity(engine, expected)
            damage, invariance = run_invariance(opener, tokens, lambda engine: measure_damage(engine, held_out))
        else:
            parity, invariance = run_gates(opener, expected, tokens)
    variant = Variant(
        graph=name, precision=job.precision, parity=parity, invariance=invariance, damage=damage, plans=plans
    )
    drafters: dict[str, Drafter] = {}
    for depth, logits in shallows.items():
        progress.stage(f"layerskip:{depth}: gates")
        drafters[f"layerskip:{depth}"] = _cut_out(job, graph, bundle, name, depth, logits, tokens)
    if job.eagle is not None and lent is not None:
        progress.stage("eagle: gates")
        drafters["eagle"] = job.eagle.export(lent, spec, bundle, job.precision, tokens)
    return Model(spec=spec, variants={job.precision: variant}), drafters


def _cut_out(
    job: _Job, graph: ir.Model, bundle: Path, whole: str, depth: int, expected: Reference, tokens: Sequence[int]
) -> LayerSkipDrafter:
    """Write the first layers of `graph` beside it, in the bundle's file `whole`, and pass them through the gates."""
    path, spec = bundle / whole, replace_fields(job.spec, num_layers=depth, taps=())
    own = path.with_name(f"layerskip-{depth}.onnx")
    cut = first_layers(graph, depth)
    save_graph(cut, own, f"{path.name}.data", graph)
    with closing(_exact_twin(cut, graph, path, spec)) as engine:
        parity = check_parity(engine, expected)
    _, invariance = run_invariance(
        lambda threads: open_engine(own, spec, EngineConfig(threads=threads)), tokens, lambda engine: None
    )
    graph_name = own.relative_to(bundle).as_posix()
    variant = Variant(graph=graph_name, precision=job.precision, parity=parity, invariance=invariance)
    return LayerSkipDrafter(model=Model(spec=spec, variants={job.precision: variant}))


def _exact_twin(graph: ir.Model, whole: ir.Model, path: Path, spec: ModelSpec) -> Engine:
    """`graph` without the rounding of activations, on the data file of `whole`, which is the graph in `path`."""
    twin = path.with_name("twin.onnx")
    save_graph(without_rounding(graph), twin, f"{path.name}.data", whole)
    try:
        return open_engine(twin, spec)
    finally:
        twin.unlink()


def _compile(
    job: _Job, bundle: Path, graph: str, options: ExportOptions, limits: Limits, progress: Progress
) -> dict[str, Plan]:
    """Build the plans of the backends that compile ahead of time."""
    plans: dict[str, Plan] = {}
    for backend in TENSORRT:
        if backend in options.backends:
            progress.stage(f"{job.role}: {backend}")
            workspace = None if options.workspace is None else options.workspace * 2**20
            for built in build_plans(bundle, graph, job.spec, limits, backend, options.archs, workspace):
                plans[built.key] = built.plan
                progress.note(
                    f"{job.role} {built.key}: {built.seconds:.0f} s, {built.nbytes / 2**20:.0f} MiB, {built.counts}"
                )
    return plans


def _quantize(job: _Job, graph: ir.Model, model: Any, options: ExportOptions) -> dict[str, Grid]:
    """Put `model`'s weights on grids and let `graph` read them; `model` has the grids' values from then on."""
    checkpoint, recipe = job.checkpoint, job.recipe
    own = read_grids(checkpoint.path, model.state_dict()) if checkpoint.format == "gguf" and recipe.keeps_own else {}
    prepared = prepare(graph, model, recipe, job.encode(_calibration(options)), own=own, keep=options.keep)
    dequantize(model, graph, prepared, TORCH_DTYPES[recipe.dtype])
    quantize_graph(graph, recipe, prepared)
    return prepared.grids


def _calibration(options: ExportOptions) -> Sequence[str]:
    return TEXTS if options.calibration is None else read_prompts(options.calibration.expanduser())


def _disk_need(job: _Job, graph: ir.Model) -> int:
    """Bytes that a model takes on disk, files that the export removes again included."""
    weights = graph_bytes(graph) + (job.eagle.nbytes if job.eagle is not None else 0)
    if job.recipe.weights is not None:
        return weights + 4 * job.spec.vocab_size * sum(map(len, job.encode([prompt.text for prompt in PROMPTS])))
    return weights * (3 if job.recipe.dtype == "bfloat16" else 1)


def _source(checkpoint: Checkpoint) -> Source:
    return Source(name=checkpoint.name, format=checkpoint.format, family=text_config(checkpoint.config).model_type)

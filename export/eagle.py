"""EAGLE's drafter as a graph of the contract, in the target's folder: its own layer, the target's embedding and head.

The graph takes a token's `features` (the target's taps, then the drafter's own state, in one of the two zeros; `eagle`
has one place for either) and hands out its own states. What it has of the target (`weights.Lender`) it reads from the
target's data file in the target's form; its own weights are rounded to the recipe's grids without calibration. This
module knows the drafter's place beside a target; it knows no family and no manifest.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import nn
from transformers import PretrainedConfig

from specdec.engines.base import Capabilities, Engine, KVBuffers
from specdec.engines.contract import Chunk, Dtype, FloatArray, IntArray, ModelSpec
from specdec.engines.errors import RequestError
from specdec.engines.invariance import run_invariance
from specdec.engines.manifest import EagleDrafter, Invariance, Model, Parity, Variant
from specdec.engines.registry import EngineConfig, open_engine
from specdec.export.attention import ChunkCache, at_indices, running_chunk
from specdec.export.check import check_parity, reference
from specdec.export.eagle_files import EMBEDDING, HEAD, IDS, MEMBERS, draft_ids, read_eagle
from specdec.export.eagle_model import EagleConfig, EagleModel
from specdec.export.grid import Grid
from specdec.export.lower_ort import lower_for_ort
from specdec.export.passes import finish, lower
from specdec.export.precision import Prepared, quantize_graph, round_weights, without_rounding
from specdec.export.recipes import ORT, RECIPES, Recipe, find_recipe
from specdec.export.trace import TORCH_DTYPES, model_spec, traced_graph
from specdec.export.weights import ALIASES, Lender, save_graph, write_graph

OWN = "own"  # the tap of a drafter's graph: what its layer leaves
_FEATURES = 97  # different features in the gates' texts
_PREFIX = "eagle."  # of the drafter's own parameters, whose names the target may have, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a drafter may use of its target, once that one is written.

    `lender`: its graph and data file; `embedding` and `head`: names of the two parameters (all of a tied one's), with
    their values [V, H] and, where they are quantized, their grids by name.
    """

    lender: Lender
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    values: Mapping[str, torch.Tensor]
    grids: Mapping[str, Grid]

    @classmethod
    def of(cls, model: Any, lender: Lender, grids: Mapping[str, Grid]) -> "Target":
        """`model`: in PyTorch, with the weights that its graph stands for."""
        parameters = list(model.named_parameters(remove_duplicate=False))
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        names = [tuple(name for name, value in parameters if value is table.weight) for table in tables]
        values = {name: value.detach() for name, value in parameters if name in (*names[0], *names[1])}
        own = {name: grid for name, grid in grids.items() if name in values}
        return cls(lender=lender, embedding=names[0], head=names[1], values=values, grids=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleJob:
    """A drafter on its way into the bundle of a target."""

    config: EagleConfig
    state: Mapping[str, torch.Tensor]
    recipe: Recipe

    @classmethod
    def open(cls, folder: Path, target: PretrainedConfig, recipe: Recipe, precision: str | None) -> "EagleJob":
        """Read and check `folder`. `recipe`: the target's; `precision`: what the user asked for (None: the target's).

        A target that rounds activations to fixed scales has a drafter that does not. Raises `ExportError`, or
        `RequestError` for a precision that does not compute in the target's type, whose embedding the drafter reads.
        """
        plain = {"float32": "fp32", "float16": "fp16"}[recipe.dtype]
        own = find_recipe(precision or (recipe.name if recipe.activations is None else plain), ORT)
        if own.dtype != recipe.dtype or own.activations is not None:
            able = [row.name for row in RECIPES if ORT[0] in row.engines and row.dtype == recipe.dtype]
            known = ", ".join(name for name in able if find_recipe(name, ORT).activations is None)
            raise RequestError(
                f"drafter eagle reads the target's embedding, which is {recipe.dtype} at {recipe.name}: "
                f"choose its precision (--draft-precision) from {known}"
            )
        config, state = read_eagle(folder, target)
        return cls(config=config, state=state, recipe=own)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on disk, at most."""
        return 4 * sum(tensor.numel() for tensor in self.state.values())

    def export(
        self, target: Target, spec: ModelSpec, bundle: Path, variant: str, tokens: Sequence[int]
    ) -> EagleDrafter:
        """Write it beside the variant `variant` of the target of `spec`; `tokens`: what the gates score."""
        path = bundle / "target" / variant / "eagle.onnx"
        shape = eagle_spec(self.config, spec, self.recipe.dtype)
        parity, invariance = write_eagle_graph(self.config, self.state, target, shape, self.recipe, path, tokens)
        ids = draft_ids(self.config, self.state)
        if ids is not None:
            np.save(path.with_name("eagle.ids.npy"), ids.numpy())
        graph = path.relative_to(bundle).as_posix()
        made = Variant(graph=graph, precision=self.recipe.name, parity=parity, invariance=invariance)
        return EagleDrafter(
            model=Model(spec=shape, variants={variant: made}),
            taps=self.config.taps,
            ids=None if ids is None else graph.replace("eagle.onnx", "eagle.ids.npy"),
        )


def eagle_spec(config: EagleConfig, target: ModelSpec, dtype: Dtype) -> ModelSpec:
    """Shape of the drafter's graph. It has as many logits as its head knows tokens, and takes the target's ids."""
    shape = model_spec(config.llama, target.vocab_size, dtype)
    own = config.llama.hidden_size if config.format == "eagle3" else 0
    fields = {"logits_size": config.draft_vocab_size, "taps": (OWN,), "features": config.tapped_size + own}
    return msgspec.structs.replace(shape, **fields)


class EagleContract(nn.Module):
    """The drafter behind the inputs and outputs of contract version 1."""

    def __init__(self, model: EagleModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_lens: torch.Tensor,
        chunk_mask: torch.Tensor,
        logit_indices: torch.Tensor,
        features: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        given = split_features(self.model.settings, features)
        with running_chunk(position_ids, past_lens, chunk_mask, past) as now:
            mask = now.mask(None)
            own = self.model.states(input_ids, *given, positions=position_ids, mask=mask, cache=ChunkCache())
        return (self.model.logits(at_indices(own, logit_indices)), own, *now.outputs())


def split_features(config: EagleConfig, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's states and the drafter's own in `features` [B, S, F]."""
    if config.format == "eagle":
        return features, None
    return features[..., : config.tapped_size], features[..., config.tapped_size :]


def trace_eagle(config: EagleConfig, spec: ModelSpec, names: Mapping[str, tuple[str, ...]]) -> ir.Model:
    """The finished graph of the drafter, without weights.

    names: of the parameters that are the target's, by the drafter's own name; a tied one's are equal.
    """
    with init_empty_weights(include_buffers=False):
        model = EagleModel(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPES[spec.dtype])
    model.eval().requires_grad_(False)
    if names.keys() >= {EMBEDDING, HEAD} and names[EMBEDDING] == names[HEAD]:
        model.lm_head.weight = model.embed_tokens.weight
    graph = traced_graph(EagleContract(model), spec)
    values = [value for value in graph.graph.initializers.values() if value.const_value is None]
    for value in values:
        name = str(value.name)
        first, *others = names.get(name, (_PREFIX + name,))
        del graph.graph.initializers[name]
        value.name = first
        value.meta.pop(ALIASES, None)
        if others:
            value.meta[ALIASES] = tuple(others)
        graph.graph.initializers[first] = value
    return finish(lower(graph), spec)


def write_eagle_graph(
    config: EagleConfig,
    state: Mapping[str, torch.Tensor],
    target: Target,
    spec: ModelSpec,
    recipe: Recipe,
    path: Path,
    tokens: Sequence[int],
) -> tuple[Parity, Invariance]:
    """Write the drafter's graph to `path`, in the target's folder, and pass it through the gates.

    `tokens`: what they score. Raises `ExportError`, or `GateError`.
    """
    model = EagleModel(config)
    own = {name: value for name, value in state.items() if name not in (IDS, MEMBERS)}
    tables = ((EMBEDDING, target.embedding), (HEAD, target.head))
    if EMBEDDING in own and torch.equal(own[EMBEDDING].float(), target.values[target.embedding[0]].float()):
        del own[EMBEDDING]
    names = {name: theirs for name, theirs in tables if name not in own}
    lent = {name: target.values[theirs[0]] for name, theirs in names.items()}
    model.load_state_dict({**own, **lent})
    model = model.to(TORCH_DTYPES[spec.dtype]).eval().requires_grad_(False)
    graph = trace_eagle(config, spec, names)
    weights = {f"{_PREFIX}{name}": value for name, value in model.state_dict().items() if name in own}
    grids = {name: grid for name, grid in target.grids.items() if any(name in theirs for theirs in names.values())}
    if recipe.weights is not None:
        grids |= round_weights(graph, weights, recipe)
    quantize_graph(graph, recipe, Prepared(weights, grids, {}))
    rounded = {name.removeprefix(_PREFIX): grid for name, grid in grids.items() if name in weights}
    model.load_state_dict({name: torch.from_numpy(grid.values()) for name, grid in rounded.items()}, strict=False)
    expected = reference(_ByToken(model), tokens, spec.vocab_size)
    lower_for_ort(graph, spec)
    write_graph(graph, weights, path, grids=grids, lender=target.lender)
    twin = path.with_name("twin.onnx")
    save_graph(without_rounding(graph), twin, f"{path.name}.data", graph, target.lender)
    try:
        with closing(_ProbedEngine(open_engine(twin, spec))) as engine:
            parity = check_parity(engine, expected)
    finally:
        twin.unlink()

    def opener(threads: int) -> Engine:
        return _ProbedEngine(open_engine(path, spec, EngineConfig(threads=threads)))

    return parity, run_invariance(opener, tokens, lambda engine: None)[1]


def _probe_features(tokens: IntArray, size: int) -> FloatArray:
    """Features [B, S, F] that depend on the token alone: the gates feed the same ones however a text is cut."""
    table = np.random.default_rng(0).standard_normal((_FEATURES, size), np.float32)
    return table[tokens % _FEATURES]


class _ByToken:
    """The drafter as a language model on probe features; its states are further logits, so gates look at both."""

    def __init__(self, model: EagleModel) -> None:
        self._model = model

    def __call__(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor) -> SimpleNamespace:
        config, weight = self._model.settings, self._model.fc.weight
        size = config.tapped_size + (config.llama.hidden_size if config.format == "eagle3" else 0)
        features = torch.from_numpy(_probe_features(input_ids.numpy(), size)).to(weight.dtype)
        given = split_features(config, features)
        with torch.inference_mode():
            own, logits = self._model(input_ids, *given)
        return SimpleNamespace(logits=torch.cat([logits, own], -1)[:, logits_to_keep])


class _ProbedEngine:
    """The drafter's engine as `_ByToken` has the model."""

    def __init__(self, engine: Engine) -> None:
        own = engine.spec
        self._engine = engine
        self.spec: ModelSpec = msgspec.structs.replace(
            own, features=0, taps=(), logits_size=own.logits_size + own.hidden_size
        )

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._engine.capabilities

    def allocate(self, rows: int, capacity: int) -> KVBuffers:
        """See `Engine.allocate`."""
        return self._engine.allocate(rows, capacity)

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        """See `Engine.step`: logits, and behind them the states of the same positions."""
        features = _probe_features(chunk.input_ids, self._engine.spec.features)
        logits = self._engine.step(replace(chunk, features=features), kv, first_row)
        return np.concatenate([logits, np.take_along_axis(kv.hidden, chunk.logit_indices[..., None], 1)], -1)

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()

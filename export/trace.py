"""A configuration becomes the graph of contract version 1, without weights.

The family's own code is run on tensors that have shapes and no data, behind the contract's inputs and outputs
(`attention`), with norms and rotary embeddings as single operators (`operators`). Each kind of decoder layer is traced
once and repeated (`layers`), and the graph is tidied and checked (`passes`). This module knows torch.export and its
ONNX translation; it knows no family and no weight.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import onnx_ir as ir
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec.engines.contract import FEATURES, OPSET, Dtype, ModelSpec, past_names, present_names
from specdec.engines.errors import ExportError
from specdec.export.attention import ContractModule, contract_attention
from specdec.export.canonical import AXES
from specdec.export.families import check_supported, text_config
from specdec.export.layers import full_plan, mark, plan_layers, repeat_layers, signatures, template_config
from specdec.export.operators import single_operators
from specdec.export.passes import finish, lower
from specdec.export.weights import ALIASES

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def model_spec(config: PretrainedConfig, vocab_size: int, dtype: Dtype) -> ModelSpec:
    """Shape of the model of `config`; `vocab_size` is the tokenizer's."""
    text: Any = text_config(config)
    heads = text.num_attention_heads
    return ModelSpec(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_size=text.hidden_size,
        logits_size=text.vocab_size,
        vocab_size=vocab_size,
        max_length=text.max_position_embeddings,
        dtype=dtype,
    )


def trace(config: PretrainedConfig, dtype: Dtype = "float32", *, repeat: bool = True) -> ir.Model:
    """Trace the model of `config` at full depth; parameters are initializers without data, named as in its state dict.

    `repeat=False` traces every layer by itself: slow, and the reference that tests compare with. Raises
    `UnsupportedModelError` before any work and `ExportError` when the family's code cannot be traced.
    """
    check_supported(config)
    text = text_config(config)
    whole = _empty_model(text, dtype)
    plan = plan_layers(whole) if repeat else full_plan(whole)
    traced = _empty_model(template_config(text, plan), dtype) if plan.repeats else whole
    if plan.repeats and signatures(traced) != tuple(signatures(whole)[index] for index in plan.templates):
        plan, traced = full_plan(whole), whole
    traced.tie_weights()
    mark(traced)
    graph = traced_graph(ContractModule(traced), model_spec(traced.config, traced.config.vocab_size, dtype))
    lower(graph)
    repeat_layers(graph, plan)
    return finish(graph, model_spec(text, text.vocab_size, dtype))


def _empty_model(config: PretrainedConfig, dtype: Dtype) -> Any:
    """The model of `config`: parameters on the meta device, buffers that it computes itself with their values."""
    own = copy.deepcopy(config)  # the model writes its dtype and attention into it
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(own, dtype=TORCH_DTYPES[dtype])  # type: ignore[no-untyped-call]
    return model.eval().requires_grad_(False)


def traced_graph(module: Any, spec: ModelSpec) -> ir.Model:
    """Trace `module`, whose `model` lies behind the contract's inputs and outputs, which get their names.

    The model is one that is made for tracing: on the meta device but for its buffers. Raises `ExportError`.
    """
    model = module.model
    buffers = dict(model.named_buffers())
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(single_operators(model))
        stack.enter_context(contract_attention(model))
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with fake:
            _fake_parameters(model)
            inputs = _example_inputs(spec)
        try:
            program = torch.export.export(module, inputs, dynamic_shapes=_dynamic_shapes(spec), strict=False)
            exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, optimize=False, verbose=False)
        except ExportError:
            raise
        except Exception as exc:  # torch.export raises anything that the family's code raises
            reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
            raise ExportError(f"{type(model).__name__} cannot be traced: {reason}") from exc
    if exported is None:
        raise ExportError(f"{type(model).__name__} cannot be traced: torch.onnx returned no graph")
    _name_values(exported.model, spec, buffers, _tied(model))
    return exported.model


def _fake_parameters(model: nn.Module) -> None:
    """Replace meta parameters by fake CPU tensors (shape, no memory), shared where they are shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            module.register_parameter(name, made[id(parameter)])


def _example_inputs(spec: ModelSpec) -> tuple[Any, ...]:
    """Inputs of sizes that occur nowhere else, so that no two axes are taken for one."""
    rows, width, positions, capacity = 2, 3, 5, 67
    dtype = TORCH_DTYPES[spec.dtype]
    past = [torch.empty(rows, spec.num_kv_heads, capacity, spec.head_dim, dtype=dtype) for _ in _cache(spec)]
    features = [torch.empty(rows, width, spec.features, dtype=dtype)] if spec.features else []
    return (
        torch.zeros(rows, width, dtype=torch.int64),
        torch.zeros(rows, width, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, width, width, dtype=torch.bool),
        torch.zeros(rows, positions, dtype=torch.int64),
        *features,
        past,
    )


def _dynamic_shapes(spec: ModelSpec) -> dict[str, Any]:
    rows, width, positions, capacity = (torch.export.Dim(axis) for axis in AXES)
    return {
        "input_ids": {0: rows, 1: width},
        "position_ids": {0: rows, 1: width},
        "past_lens": {0: rows},
        "chunk_mask": {0: rows, 1: width, 2: width},
        "logit_indices": {0: rows, 1: positions},
        **({FEATURES: {0: rows, 1: width}} if spec.features else {}),
        "past": [{0: rows, 2: capacity} for _ in _cache(spec)],
    }


def _cache(spec: ModelSpec) -> list[str]:
    return list(past_names(spec.num_layers))


def _tied(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names that one parameter has, in module order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _name_values(
    model: ir.Model, spec: ModelSpec, buffers: dict[str, torch.Tensor], tied: list[tuple[str, ...]]
) -> None:
    """Name inputs, outputs and parameters as the contract and the state dict do; embed the buffers' values.

    A tied parameter has its first name, the others are its `ALIASES`.
    """
    graph = model.graph
    for value, name in zip(graph.inputs, [*spec.inputs, *past_names(spec.num_layers)], strict=True):
        value.name = name
    for value, name in zip(graph.outputs, [*spec.outputs, *present_names(spec.num_layers)], strict=True):
        value.name = name
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = value.name.removeprefix("model.")
        graph.initializers.pop(value.name)
        value.name = name
        value.const_value = ir.tensor(buffers[name].numpy(), name=name) if name in buffers else None
        graph.initializers[name] = value
    for names in tied:
        value = graph.initializers.pop(next(name for name in names if name in graph.initializers))
        value.name = names[0]
        value.meta[ALIASES] = names[1:]
        graph.initializers[names[0]] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks on what it does not need (torchvision) and on its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)

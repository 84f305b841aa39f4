"""Groups are read off every family's graph, smoothing changes no result, and nothing shared is touched."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specdec.engines.errors import ExportError
from specdec.export.calibrate import collect
from specdec.export.smooth import Group, Size, find_groups, smooth
from specdec.export.trace import trace
from specdec.export.weights import ALIASES
from support import models

PROMPTS = [[5, 17, 3, 99, 4, 4, 60], [1, 2, 3, 4]]


def sources(group: Group) -> str:
    return " ".join(source.name for source in group.sources)


def consumers(group: Group) -> str:
    return " ".join(consumer.name for consumer in group.consumers)


def layer(prefix: str, groups: list[Group]) -> dict[str, str]:
    """Sources to consumers within the layer whose names begin with `prefix`, which is dropped."""
    return {
        sources(group).replace(prefix, ""): consumers(group).replace(prefix, "")
        for group in groups
        if sources(group).startswith(prefix)
    }


LLAMA = {
    "input_layernorm.weight": "self_attn.k_proj.weight self_attn.q_proj.weight self_attn.v_proj.weight",
    "post_attention_layernorm.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.up_proj.weight": "mlp.down_proj.weight",
}
EXPECTED: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("model.layers.1.", LLAMA),
    "qwen2": ("model.layers.1.", LLAMA),
    "gemma3": (
        "model.layers.1.",
        {
            "input_layernorm.weight": LLAMA["input_layernorm.weight"],
            "pre_feedforward_layernorm.weight": LLAMA["post_attention_layernorm.weight"],
            "mlp.up_proj.weight": "mlp.down_proj.weight",
        },
    ),
    "phi3": (
        "model.layers.1.",
        {
            "input_layernorm.weight": "self_attn.qkv_proj.weight",
            "post_attention_layernorm.weight": "mlp.gate_up_proj.weight",
        },
    ),
    "gpt2": (
        "transformer.h.1.",
        {"ln_1.weight ln_1.bias": "attn.c_attn.weight", "ln_2.weight ln_2.bias": "mlp.c_fc.weight"},
    ),
}


@pytest.mark.parametrize("family", sorted(EXPECTED))
def test_groups_of_a_family_and_their_smoothing(family: str) -> None:
    model = models.random_model(models.FAMILIES[family]())
    groups = find_groups(trace(model.config))
    prefix, expected = EXPECTED[family]
    assert layer(prefix, groups) == expected
    assert len(groups) == len(expected) * model.config.num_hidden_layers
    assert {source.offset for group in groups for source in group.sources} <= {0.0, float(family == "gemma3")}

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    statistics = collect(model, PROMPTS)
    logits = run(model)
    smoothed, factors = smooth(model.state_dict(), groups, statistics, alpha=0.5)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    touched = {part.name for group in groups for part in (*group.sources, *group.consumers)}
    assert {name for name in before if smoothed[name].data_ptr() != model.state_dict()[name].data_ptr()} == touched
    model.load_state_dict(smoothed)
    peak = float(logits.abs().max())
    assert float((run(model) - logits).abs().max()) < 1e-5 * max(peak, 1)
    after = collect(model, PROMPTS)
    for group in groups:  # inputs and weights now share their extremes
        name = group.consumers[0].name
        axes = [(smoothed[consumer.name].abs().amax(1 - consumer.axis)) for consumer in group.consumers]
        columns = torch.stack(axes).amax(0).numpy()
        np.testing.assert_allclose(np.ptp(np.log(after[name].maximum / columns)), 0, atol=1e-3)
        np.testing.assert_allclose(after[name].maximum * factors[name].numpy(), statistics[name].maximum, rtol=1e-3)


def run(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits
    return logits


def spread(maximum: np.ndarray) -> float:
    return float(np.log(maximum).std())


@pytest.mark.parametrize("size", ["maximum", "rms"])
def test_alpha_one_makes_inputs_equally_large(size: Size) -> None:
    model = models.random_model(models.llama())
    groups, statistics, logits = find_groups(trace(model.config)), collect(model, PROMPTS), run(model)
    model.load_state_dict(smooth(model.state_dict(), groups, statistics, alpha=1.0, size=size)[0])
    assert float((run(model) - logits).abs().max()) < 1e-5 * max(float(logits.abs().max()), 1)
    found = collect(model, PROMPTS)[groups[0].consumers[0].name]
    assert spread(found.maximum if size == "maximum" else found.mean_square) < 1e-3


def test_a_silent_channel_is_left() -> None:
    model = models.random_model(models.llama())
    groups = find_groups(trace(model.config))
    norm = model.model.layers[0].input_layernorm.weight
    norm[3] = 0
    statistics, logits = collect(model, PROMPTS), run(model)
    model.load_state_dict(smooth(model.state_dict(), groups, statistics, alpha=0.8)[0])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    assert float((run(model) - logits).abs().max()) < 1e-4


def test_parameters_with_other_readers_or_names_are_left() -> None:
    graph = trace(models.llama())
    whole = find_groups(graph)
    first = whole[0].sources[0].name
    graph.graph.initializers[first].meta[ALIASES] = ("elsewhere",)
    assert find_groups(graph) == whole[1:]
    norm = next(node for node in graph.graph if node.op_type == "RMSNormalization" and first in names(node))
    del graph.graph.initializers[first].meta[ALIASES]
    graph.graph.append(ir.node("Neg", [norm.outputs[0]]))  # the channels are read by something else
    assert find_groups(graph) == whole[1:]


def names(node: ir.Node) -> list[str | None]:
    return [value.name for value in node.inputs if value is not None]


def test_inputs_that_were_not_calibrated_are_named() -> None:
    model = models.random_model(models.llama())
    with pytest.raises(ExportError, match=r"inputs of model\.layers\.2\.mlp\.down_proj\.weight were not calibrated"):
        smooth(model.state_dict(), find_groups(trace(model.config)), {}, alpha=0.5)

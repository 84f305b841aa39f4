"""Layers are traced once per kind and repeated; a layer that cannot be cut out cleanly is an error that says why."""

import onnx_ir as ir
import pytest

from specdec.engines.errors import ExportError
from specdec.export import layers
from specdec.export.trace import trace
from support import graphs, models


def serialized(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString())


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
@pytest.mark.slow
def test_repeating_gives_the_bytes_of_tracing_every_layer(family: str) -> None:
    config = models.FAMILIES[family]()
    assert serialized(trace(config)) == serialized(trace(config, repeat=False))


def test_kinds_of_layers() -> None:
    plan = layers.plan_layers(models.random_model(models.gemma3()))
    assert plan == layers.LayerPlan(templates=(0, 2), kinds=(0, 0, 1, 0), prefix="model.layers")
    assert plan.repeats
    reduced = layers.template_config(models.gemma3(), plan)
    assert reduced.num_hidden_layers == 2
    assert reduced.layer_types == ["sliding_attention", "full_attention"]
    plan = layers.plan_layers(models.random_model(models.gpt2()))
    assert plan == layers.LayerPlan(templates=(0,), kinds=(0, 0, 0), prefix="transformer.h")


def test_layers_that_differ_in_a_scalar_or_a_shape_are_of_different_kinds() -> None:
    model = models.random_model(models.llama())
    model.model.layers[1].self_attn.scaling = 0.5
    assert layers.plan_layers(model).kinds == (0, 1, 0)
    assert not layers.full_plan(model).repeats


def marked_graph(*, stray: bool = False, crossing: bool = False, between: bool = False) -> ir.Model:
    """Two marked layers h -> h * weight + past.

    `stray`: an inner value leaves; `crossing`: layer 1 reads inside layer 0; `between`: something lies between them.
    """
    x = graphs.value("x", ["n"])
    past = [graphs.value(f"past_key_values.{index}.{part}", ["n"]) for index in (0, 1) for part in ("key", "value")]
    nodes: list[ir.Node] = []
    hidden, inner, present = x, [], []
    for index in (0, 1):
        enter = ir.node("Enter", [hidden], {"layer": index}, domain=layers.MARKER_DOMAIN)
        scaled = graphs.node("Mul", [enter.outputs[0], graphs.value(f"layers.{index}.weight", ["n"])], ["n"])
        inner.append(scaled.outputs[0])
        read = inner[0] if crossing else scaled.outputs[0]
        keys = graphs.node("Add", [read, past[2 * index]], ["n"])
        values = graphs.node("Sub", [scaled.outputs[0], past[2 * index + 1]], ["n"])
        total = graphs.node("Add", [keys.outputs[0], values.outputs[0]], ["n"])
        leave = ir.node("Leave", [total.outputs[0]], {"layer": index}, domain=layers.MARKER_DOMAIN)
        for made, part in ((keys, "key"), (values, "value")):
            made.outputs[0].name = f"present.{index}.{part}"
            present.append(made.outputs[0])
        nodes += [enter, scaled, keys, values, total, leave]
        hidden = leave.outputs[0]
        if between:
            nodes.append(graphs.node("Neg", [hidden], ["n"]))
            hidden = nodes[-1].outputs[0]
    last = graphs.node("Add", [hidden, inner[0]] if stray else [hidden, hidden], ["n"])
    last.outputs[0].name = "logits"
    return graphs.model([x, *past], [*nodes, last], [last.outputs[0], *present])


PLAN = layers.LayerPlan(templates=(0, 1), kinds=(0, 1, 1), prefix="layers")


def test_marked_layers_are_repeated() -> None:
    model = marked_graph()
    layers.repeat_layers(model, PLAN)
    assert graphs.operators(model) == ["Mul", "Add", "Sub", "Add"] * 3 + ["Add"]
    assert [value.name for value in model.graph.outputs][-2:] == ["present.2.key", "present.2.value"]
    assert [value.name for value in model.graph.inputs][-2:] == ["past_key_values.2.key", "past_key_values.2.value"]
    assert sorted(model.graph.initializers) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"stray": True}, "decoder layer 0 cannot be repeated: .* is used outside it"),
        ({"crossing": True}, "decoder layer 0 cannot be repeated: .* is used outside it"),
        ({"between": True}, "decoder layer 1 cannot be repeated: it does not read layer 0"),
    ],
)
def test_a_layer_with_other_inputs_or_outputs_is_an_error(fault: dict[str, bool], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        layers.repeat_layers(marked_graph(**fault), PLAN)


def test_a_missing_marker_is_an_error() -> None:
    model = marked_graph()
    plan = layers.LayerPlan(templates=(0, 1, 2), kinds=(0, 1, 2), prefix="layers")
    with pytest.raises(ExportError, match="decoder layer 2 left no Enter marker"):
        layers.repeat_layers(model, plan)


def test_a_model_without_one_list_of_layers_is_an_error() -> None:
    model = models.random_model(models.llama())
    model.config.num_hidden_layers = 5
    with pytest.raises(ExportError, match="LlamaForCausalLM: expected one list of 5 decoder layers, found 0"):
        layers.decoder_layers(model)

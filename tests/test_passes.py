"""Each graph pass does what it says, computes the same, and names what it cannot do."""

import numpy as np
import onnx_ir as ir
import pytest

from specdec.engines.contract import ModelSpec, past_names, present_names
from specdec.engines.errors import ExportError
from specdec.export import passes
from specdec.export.canonical import CanonicalForm, ContractForm
from specdec.export.weights import TRANSPOSED
from support import graphs

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def constant(name: str, data: list[int]) -> ir.Value:
    tensor = ir.tensor(np.array(data, np.int64), name=name)
    return ir.Value(name=name, type=graphs.INT64, shape=ir.Shape([len(data)]), const_value=tensor)


def test_reshape_copies_axes_that_stay() -> None:
    x, sizes = graphs.value("x", ["b", "s", 12]), graphs.value("sizes", [4], graphs.INT64)
    split = graphs.node("Reshape", [x, sizes], ["b", "s", 3, 4], allowzero=1)
    model = graphs.model([x, sizes], [split], split.outputs)
    assert passes.ConstantReshapes()(model).modified
    found = ir.convenience.get_const_tensor(split.inputs[1])
    assert found is not None
    assert found.numpy().tolist() == [0, 0, 3, 4]
    assert "allowzero" not in split.attributes


def test_reshape_with_two_unknown_axes_is_left() -> None:
    x, sizes = graphs.value("x", ["n", 12]), graphs.value("sizes", [3], graphs.INT64)
    split = graphs.node("Reshape", [x, sizes], ["b", "s", 12])
    model = graphs.model([x, sizes], [split], split.outputs)
    assert not passes.ConstantReshapes()(model).modified


@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_heads_attend_as_rows(groups: int) -> None:
    def build() -> ir.Model:
        q = graphs.value("q", ["b", 2 * groups, "s", 8])
        k, v = (graphs.value(name, ["b", 2, "c", 8]) for name in ("k", "v"))
        mask = graphs.value("mask", ["b", 1, "s", "c"], ir.TensorType(ir.DataType.BOOL))
        attend = graphs.node("Attention", [q, k, v, mask], ["b", 2 * groups, "s", 8], scale=0.3)
        attend.outputs[0].name = "y"
        return graphs.model([q, k, v, mask], [attend], attend.outputs)

    mask = np.tril(np.ones((5, 16), bool), 6)[None, None].repeat(2, 0)
    feeds = {"q": random(2, 2 * groups, 5, 8), "k": random(2, 2, 16, 8), "v": random(2, 2, 16, 8), "mask": mask}
    plain, packed = build(), build()
    assert passes.PackedGroups()(packed).modified == (groups > 1)
    assert graphs.operators(packed).count("Reshape") == (2 if groups > 1 else 0)
    np.testing.assert_allclose(graphs.run(packed, feeds)[0], graphs.run(plain, feeds)[0], atol=1e-6)


def product(tied: bool) -> ir.Model:
    """logits = x @ weight.T, and the rows of `weight` by `ids` when it is tied."""
    x, ids = graphs.value("x", ["b", "n", 6]), graphs.value("ids", ["b"], graphs.INT64)
    weight = graphs.value("head.weight", [10, 6])
    transpose = graphs.node("Transpose", [weight], [6, 10], perm=[1, 0])
    matmul = graphs.node("MatMul", [x, transpose.outputs[0]], ["b", "n", 10])
    matmul.outputs[0].name = "logits"
    if not tied:
        return graphs.model([x], [transpose, matmul], matmul.outputs)
    gather = graphs.node("Gather", [weight, ids], ["b", 6])
    gather.outputs[0].name = "rows"
    return graphs.model([x, ids], [transpose, matmul, gather], [matmul.outputs[0], gather.outputs[0]])


def test_weights_are_stored_as_products_read_them() -> None:
    model, x, weight = product(tied=False), random(2, 3, 6), random(10, 6)
    assert passes.TransposedWeights()(model).modified
    assert graphs.operators(model) == ["MatMul"]
    stored = model.graph.initializers["head.weight"]
    assert stored.meta[TRANSPOSED] == "head.weight"
    assert stored.shape == ir.Shape([6, 10])
    found = graphs.run(model, {"x": x}, {"head.weight": np.ascontiguousarray(weight.T)})[0]
    np.testing.assert_allclose(found, x @ weight.T, atol=1e-5)


def test_a_tied_head_reads_the_embedding_as_it_lies() -> None:
    model, x, weight = product(tied=True), random(2, 3, 6), random(10, 6)
    assert passes.TiedHead()(model).modified
    passes.MergedConstants()(model)
    model.graph.sort()
    assert "Gemm" in graphs.operators(model)
    assert "MatMul" not in graphs.operators(model)
    ids = np.array([1, 7])
    transposed = [step for step in model.graph if step.op_type == "Transpose"]
    model.graph.remove(transposed, safe=True)
    logits, rows = graphs.run(model, {"x": x, "ids": ids}, {"head.weight": weight})
    np.testing.assert_allclose(logits, x @ weight.T, atol=1e-5)
    np.testing.assert_array_equal(rows, weight[ids])


def test_an_untied_head_is_left() -> None:
    assert not passes.TiedHead()(product(tied=False)).modified


def test_equal_constants_become_one() -> None:
    x = graphs.value("x", ["a", "b"])
    first, second = (graphs.node("Unsqueeze", [x, constant(name, [0])], [1, "a", "b"]) for name in ("c1", "c2"))
    other = graphs.node("Unsqueeze", [x, constant("c3", [1])], ["a", 1, "b"])
    model = graphs.model([x], [first, second, other], [step.outputs[0] for step in (first, second, other)])
    passes.MergedConstants()(model)
    assert first.inputs[1] is second.inputs[1]
    assert first.inputs[1] is not other.inputs[1]


def test_canonical_form_forgets_the_trace() -> None:
    def build(order: list[int], mark: str) -> bytes:
        x = graphs.value(f"x{mark}", ["n"])
        x.name = "x"
        steps = [graphs.node("Neg", [x], ["n"]), graphs.node("Abs", [x], ["n"])]
        total = graphs.node("Add", [steps[0].outputs[0], steps[1].outputs[0]], ["n"])
        total.outputs[0].name = "y"
        for step in [*steps, total]:
            step.name, step.doc_string = f"{step.op_type}{mark}", mark
            step.metadata_props["pkg.torch.onnx.stack_trace"] = f"/home/{mark}.py"
        model = graphs.model([x], [*(steps[index] for index in order), total], total.outputs)
        model.producer_version = mark
        CanonicalForm()(model)
        return ir.to_proto(model).SerializeToString()

    assert build([0, 1], "alice") == build([1, 0], "bob")
    assert b"alice" not in build([0, 1], "alice")


SPEC = ModelSpec(num_layers=1, num_kv_heads=2, head_dim=4, hidden_size=8, logits_size=10, vocab_size=10, max_length=64)


def contract_model(**changes: ir.Value) -> ir.Model:
    cache = ["r", 2, "c", 4]
    axes = {
        "input_ids": ["r", "s"],
        "position_ids": ["r", "s"],
        "past_lens": ["r"],
        "chunk_mask": ["r", "s", "s"],
        "logit_indices": ["r", "n"],
    }
    ends = {name: graphs.value(name, sizes, graphs.INT64) for name, sizes in axes.items()}
    ends["chunk_mask"].type = ir.TensorType(ir.DataType.BOOL)
    ends |= {name: graphs.value(name, cache) for name in past_names(1)}
    ends |= changes
    logits = graphs.node("RandomUniform", [], ["r", "n", 10], shape=[1, 1, 10])
    steps = [graphs.node("Neg", [ends[name]], cache) for name in past_names(1)]
    outputs = [step.outputs[0] for step in (logits, *steps)]
    for output, name in zip(outputs, ["logits", *present_names(1)], strict=True):
        output.name = name
    return graphs.model(list(ends.values()), [logits, *steps], outputs)


def check_contract(model: ir.Model) -> ir.Model:
    return passes.run_passes(model, [ContractForm(SPEC)])


def test_contract_form_names_the_axes() -> None:
    model = check_contract(contract_model())
    assert str(model.graph.inputs[3].shape) == "[batch,chunk,chunk]"
    assert str(model.graph.outputs[0].shape) == "[batch,num_logits,10]"
    assert str(model.graph.outputs[1].shape) == "[batch,2,capacity,4]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"past_lens": graphs.value("past_lens", ["r"])}, "past_lens is FLOAT"),
        ({"past_lens": graphs.value("past_lens", [2], graphs.INT64)}, r"past_lens is INT64 \[2\]"),
        ({"past_lens": graphs.value("lengths", ["r"], graphs.INT64)}, "the traced graph has .*'lengths'"),
    ],
)
def test_contract_form_names_what_differs(changes: dict[str, ir.Value], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check_contract(contract_model(**changes))


def test_contract_form_refuses_other_operators() -> None:
    model = contract_model()
    model.graph[1].domain = "com.microsoft"
    with pytest.raises(ExportError, match=r"com\.microsoft::Neg is not of the standard opset 24"):
        check_contract(model)


def test_a_pass_that_fails_is_named() -> None:
    class Broken(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            raise KeyError("scale")

    with pytest.raises(ExportError, match=r"graph pass Broken failed: .*scale"):
        passes.run_passes(contract_model(), [Broken()])

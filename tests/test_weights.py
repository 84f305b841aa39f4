"""Weights on disk: streamed, aligned, reproducible; what is missing, left over or misshapen is named."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specdec.engines.errors import ExportError, ResourceError
from specdec.export.weights import ALIASES, ALIGNMENT, PARTS, TRANSPOSED, graph_bytes, write_graph
from support import graphs


def graph(dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """y = x @ proj.T + bias; `proj.weight` is stored transposed and tied to `head.weight`."""
    kind = ir.TensorType(dtype)
    x = graphs.value("x", ["n", 5], kind)
    weight, bias = graphs.value("proj.weight", [5, 3], kind), graphs.value("proj.bias", [3], kind)
    weight.meta[TRANSPOSED], weight.meta[ALIASES] = "proj.weight", ("head.weight",)
    matmul = graphs.node("MatMul", [x, weight], ["n", 3])
    add = graphs.node("Add", [matmul.outputs[0], bias], ["n", 3])
    matmul.outputs[0].name, add.outputs[0].name, add.outputs[0].type = "product", "y", kind
    return graphs.model([x], [matmul, add], add.outputs)


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "proj.weight": torch.randn(3, 5, generator=random),
        "proj.bias": torch.randn(3, generator=random),
    }


def test_data_is_transposed_aligned_and_as_large_as_foretold(tmp_path: Path) -> None:
    model, given, seen = graph(), weights(), []
    write_graph(model, given, tmp_path / "model.onnx", lambda done, total: seen.append((done, total)))
    data = (tmp_path / "model.onnx.data").read_bytes()
    assert len(data) == graph_bytes(model) == ALIGNMENT + 12
    stored = np.frombuffer(data, np.float32, 15).reshape(5, 3)
    np.testing.assert_array_equal(stored, given["proj.weight"].numpy().T)
    assert seen == [(60, 76), (76, 76)]
    x = np.ones((2, 5), np.float32)
    session = graphs.ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    expected = x @ given["proj.weight"].numpy().T + given["proj.bias"].numpy()
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, atol=1e-6)
    assert all(value.const_value is None for value in model.graph.initializers.values())


def joined_graph() -> ir.Model:
    """y = x @ [a | b].T + [c | d]: a [3, 5], b [2, 5], c [3], d [2]."""
    x = graphs.value("x", ["n", 5])
    weight, bias = graphs.value("a.joined", [5, 5]), graphs.value("c.joined", [5])
    weight.meta[TRANSPOSED], weight.meta[PARTS] = "a.joined", (("a", 3), ("b", 2))
    bias.meta[PARTS] = (("c", 3), ("d", 2))
    matmul = graphs.node("MatMul", [x, weight], ["n", 5])
    add = graphs.node("Add", [matmul.outputs[0], bias], ["n", 5])
    matmul.outputs[0].name, add.outputs[0].name = "product", "y"
    return graphs.model([x], [matmul, add], add.outputs)


def test_joined_parameters_lie_side_by_side(tmp_path: Path) -> None:
    shapes = {"a": (3, 5), "b": (2, 5), "c": (3,), "d": (2,)}
    given = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    write_graph(joined_graph(), given, tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    session = graphs.ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    expected = [x @ given[weight].numpy().T + given[bias].numpy() for weight, bias in (("a", "c"), ("b", "d"))]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], np.concatenate(expected, 1), atol=1e-6)
    del given["b"]
    with pytest.raises(ExportError, match="the checkpoint has no weight b"):
        write_graph(joined_graph(), given, tmp_path / "model.onnx")
    given["b"] = torch.zeros(3, 5)
    with pytest.raises(ExportError, match=r"weight b has shape \[3, 5\], the model needs \[2, 5\]"):
        write_graph(joined_graph(), given, tmp_path / "model.onnx")


def test_half_precision_is_cast_tensor_by_tensor(tmp_path: Path) -> None:
    model, given = graph(ir.DataType.FLOAT16), weights()
    given["proj.bias"] = given["proj.bias"].to(torch.bfloat16)
    write_graph(model, given, tmp_path / "model.onnx")
    data = (tmp_path / "model.onnx.data").read_bytes()
    assert len(data) == graph_bytes(model)
    np.testing.assert_array_equal(np.frombuffer(data, np.float16, 15), given["proj.weight"].T.flatten().half().numpy())


def test_two_writes_are_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_graph(graph(), weights(), tmp_path / folder / "model.onnx")
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("names", [("proj.weight",), ("head.weight",), ("proj.weight", "head.weight")])
def test_a_tied_weight_may_have_any_of_its_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    given = weights()
    tied = given.pop("proj.weight")
    write_graph(graph(), {**given, **{name: tied.clone() for name in names}}, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size == graph_bytes(graph())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proj.bias": None}, "the checkpoint has no weight proj.bias, which the model needs"),
        ({"odd.weight": torch.ones(1)}, r"the checkpoint's weight odd.weight is not used by the model \(1 unused"),
        ({"proj.bias": torch.ones(4)}, r"weight proj.bias has shape \[4\], the model needs \[3\]"),
        ({"proj.weight": torch.ones(5, 3)}, r"weight proj.weight has shape \[5, 3\], the model needs \[3, 5\]"),
        ({"head.weight": torch.ones(3, 5)}, "weights proj.weight and head.weight differ, the model ties them"),
    ],
)
def test_wrong_weights_are_named_before_anything_is_written(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    given = {name: tensor for name, tensor in {**weights(), **change}.items() if tensor is not None}
    with pytest.raises(ExportError, match=message):
        write_graph(graph(), given, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"nowhere/model.onnx.data cannot be written: No such file or directory"):
        write_graph(graph(), weights(), tmp_path / "nowhere" / "model.onnx")
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ResourceError, match=r"model.onnx cannot be written: Is a directory"):
        write_graph(graph(), weights(), tmp_path / "model.onnx")

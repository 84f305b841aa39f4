"""Plans compiled by the real TensorRT-RTX, which needs no GPU for it: what builds, what is counted, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
import pytest

from specdec.engines import nvidia
from specdec.engines.contract import ModelSpec
from specdec.engines.errors import EngineUnavailableError, ExportError, RequestError, ResourceError
from specdec.engines.manifest import Limits, Plan
from specdec.engines.nvidia import Device, Nvidia
from specdec.engines.plan import plan_sizes, profiles
from specdec.engines.trt_library import collecting_logger, load_library, tidy
from specdec.export import bundle as bundle_module
from specdec.export.tensorrt import BuiltPlan, build, build_memory, build_plans, check_network, fixed_capacity
from specdec.export.trace import model_spec, trace
from specdec.export.weights import write_graph
from support import models
from support.qdq import quantized

pytest.importorskip("tensorrt_rtx", reason="the real builder")

LAYERS, PRODUCTS = 2, 10  # five products a layer; the head's is left alone
LIMITS = Limits(max_batch=4, max_length=100, max_tree=8)
GRAPH = "target/x/model.onnx"
# What each precision does to the products of the fp16 graph.
RECIPES: dict[str, dict[str, Any]] = {
    "fp16": {},
    "int8-w8a8": {"kind": ir.DataType.INT8, "activations": True},
    "fp8": {"kind": ir.DataType.FLOAT8E4M3FN, "activations": True},
    "int4": {"kind": ir.DataType.INT4, "block": 64},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    """A bundle folder with the fp16 graph of a tiny llama whose products' sizes are multiples of 64."""
    config = models.llama(hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, head_dim=32)
    bundle = tmp_path_factory.mktemp("plain")
    (bundle / GRAPH).parent.mkdir(parents=True)
    write_graph(trace(config, "float16"), models.random_model(config).half().state_dict(), bundle / GRAPH)
    return bundle, model_spec(config, config.vocab_size, "float16")


@pytest.fixture(scope="module")
def made(plain: tuple[Path, ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle folder with the graph of a precision."""
    known: dict[str, Path] = {"fp16": plain[0]}

    def make(recipe: str) -> Path:
        if recipe not in known:
            known[recipe] = tmp_path_factory.mktemp(recipe)
            quantized(plain[0] / GRAPH, known[recipe] / GRAPH, **RECIPES[recipe])
        return known[recipe]

    return make


def compile_graph(
    bundle: Path, spec: ModelSpec, *architectures: str, limits: Limits = LIMITS, **more: Any
) -> BuiltPlan:
    (built,) = build_plans(bundle, GRAPH, spec, limits, "tensorrt-rtx", architectures, **more)
    return built


def edited(plain: tuple[Path, ModelSpec], folder: Path, edit: Callable[[ir.Model], None]) -> Path:
    """A bundle folder whose fp16 graph was changed."""
    model = ir.load(plain[0] / GRAPH)
    ir.external_data.load_to_model(model)
    edit(model)
    (folder / GRAPH).parent.mkdir(parents=True)
    ir.save(model, folder / GRAPH)
    return folder


@pytest.mark.parametrize("architecture", ["sm89", "sm120"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_precision_builds(
    made: Callable[[str], Path], plain: tuple[Path, ModelSpec], recipe: str, architecture: str
) -> None:
    bundle = made(recipe)
    built = compile_graph(bundle, plain[1], architecture)
    assert built.key == f"tensorrt-rtx-{architecture}"
    assert built.plan.file == f"target/x/tensorrt-rtx-{architecture}.plan"
    assert (bundle / built.plan.file).stat().st_size == built.nbytes > 1_000_000
    rounds = PRODUCTS if RECIPES[recipe].get("activations") else 0
    weights = PRODUCTS if RECIPES[recipe] else 0
    assert (built.counts.quantize, built.counts.dequantize) == (rounds, rounds + weights)
    assert (built.counts.kv_updates, built.counts.attentions) == (2 * LAYERS, LAYERS)


def test_the_record_says_what_the_engine_takes(plain: tuple[Path, ModelSpec]) -> None:
    plan = compile_graph(plain[0], plain[1], "sm120", "sm89", workspace=2**28).plan
    assert plan.architectures == ["sm89", "sm120"]
    assert plan.library == load_library("tensorrt-rtx").__version__
    assert (plan.max_batch, plan.prefill_width, plan.verify_width, plan.capacity) == (4, 128, 8, 128)
    integers = ["input_ids", "position_ids", "past_lens", "logit_indices"]
    caches = [f"past_key_values.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    assert plan.inputs == {**dict.fromkeys(integers, "int64"), "chunk_mask": "bool", **dict.fromkeys(caches, "float16")}


def test_bfloat16_builds_with_float32_logits(plain: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    bundle = edited(plain, tmp_path, to_bfloat16)
    spec = msgspec.structs.replace(plain[1], dtype="bfloat16")
    assert compile_graph(bundle, spec, "sm89").plan.inputs["past_key_values.0.key"] == "bfloat16"
    with pytest.raises(ExportError, match=r"cannot compile this graph for sm75: .*HW-specific datatypes: b16"):
        compile_graph(bundle, spec, "sm75")


def test_float8_is_refused_where_the_hardware_lacks_it(made: Callable[[str], Path], plain: tuple[Path, Any]) -> None:
    bundle = made("fp8")
    reason = (
        "tensorrt-rtx cannot compile this graph for sm80: Myelin \\(Cannot compile for target\\(s\\) sm80, because the"
    )
    with pytest.raises(ExportError, match=f"^{reason} model contains HW-specific datatypes: fp8_e4m3") as caught:
        compile_graph(bundle, plain[1], "sm80")
    assert "\n" not in str(caught.value)
    assert "/_src" not in str(caught.value)
    assert not (bundle / "target/x/tensorrt-rtx-sm80.plan").exists()


def test_an_operator_that_the_parser_does_not_know(plain: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    def contrib(model: ir.Model) -> None:
        node = next(step for step in model.graph if step.op_type == "Sigmoid")
        node.op_type, node.domain = "QuickGelu", "com.microsoft"
        model.opset_imports["com.microsoft"] = 1

    bundle = edited(plain, tmp_path, contrib)
    with pytest.raises(
        ExportError, match=r"^tensorrt-rtx does not take this graph: QuickGelu Sigmoid.0: .*not found"
    ) as caught:
        compile_graph(bundle, plain[1], "sm89")
    assert "\n" not in str(caught.value)


def test_a_bad_profile(plain: tuple[Path, ModelSpec]) -> None:
    with pytest.raises(ExportError, match=r"tensorrt-rtx refuses the profile verify 0 x 8 \(logits at 8\): "):
        compile_graph(plain[0], plain[1], "sm89", limits=Limits(max_batch=0, max_length=100, max_tree=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "has 4 cache updates in place, the graph asks for 6"),
        ({"head_dim": 16}, r"past_key_values.0.key of the parsed network is .*, the contract says .*16"),
        ({"logits_size": 100}, r"logits of the parsed network is .*101.*, the contract says .*100"),
        ({"dtype": "float32"}, r"past_key_values.0.key of the parsed network is \('float16'"),
    ],
)
def test_a_graph_of_another_model(plain: tuple[Path, ModelSpec], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        compile_graph(plain[0], msgspec.structs.replace(plain[1], **changes), "sm89")


def test_an_input_that_nothing_reads(plain: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    """As when a parser drops what it does not support: here positions are read from the ids."""

    def no_positions(model: ir.Model) -> None:
        ids, positions = model.graph.inputs[:2]
        positions.replace_all_uses_with(ids)

    bundle = edited(plain, tmp_path, no_positions)
    with pytest.raises(ExportError, match="the parsed network reads position_ids nowhere: the parser dropped what did"):
        compile_graph(bundle, plain[1], "sm89")


def test_a_cache_that_is_not_updated_in_place(plain: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    def copied(model: ir.Model) -> None:
        node = next(step for step in model.graph if step.op_type == "TensorScatter")
        new, old = ir.node("Identity", [node.inputs[0]]), node.outputs[0]
        model.graph.insert_before(node, new)
        new.outputs[0].shape, new.outputs[0].type = old.shape, old.type
        old.replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
        new.outputs[0].name, old.name = old.name, "unused"
        model.graph.remove(node, safe=True)

    bundle = edited(plain, tmp_path, copied)
    with pytest.raises(ExportError, match="has 3 cache updates in place, the graph asks for 4"):
        compile_graph(bundle, plain[1], "sm89")


def test_a_pair_that_the_parser_dropped(made: Callable[[str], Path], plain: tuple[Path, ModelSpec]) -> None:
    """No parser that we know drops one, so the count is checked against a graph with one pair more."""
    library = load_library("tensorrt-rtx")
    logger, _ = collecting_logger(library)
    builder = library.Builder(logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    path = made("int8-w8a8") / GRAPH
    model = fixed_capacity(path, 128)
    parser = library.OnnxParser(network, logger)
    assert parser.parse(ir.to_proto(model).SerializeToString(), str(path))
    assert check_network(network, model, plain[1], 128).quantize == PRODUCTS
    for operator, what in (("QuantizeLinear", "quantization"), ("DequantizeLinear", "dequantization")):
        node = next(step for step in model.graph if step.op_type == operator)
        more = ir.node(operator, list(node.inputs))
        model.graph.insert_after(node, more)
        with pytest.raises(ExportError, match=rf"has \d+ {what} layers, the graph asks for \d+"):
            check_network(network, model, plain[1], 128)
        model.graph.remove(more, safe=True)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        ((), r"needs to know for which GPUs: name each with --arch, of sm75, sm80, sm86, sm89, sm120"),
        (("sm90",), r"does not compile for sm90: choose from sm75, .*; other GPUs need --backend tensorrt"),
        (("sm89", "ada"), "does not compile for ada"),
    ],
)
def test_architectures(plain: tuple[Path, ModelSpec], architectures: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compile_graph(plain[0], plain[1], *architectures)


def test_tensorrt_compiles_for_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library is not installed where this runs: only what is decided before it is used."""
    from specdec.export.tensorrt import known_architectures

    monkeypatch.setattr(nvidia, "probe", lambda: Nvidia(problem="no NVIDIA driver"))
    with pytest.raises(ExportError, match="no NVIDIA driver; --backend tensorrt-rtx needs none"):
        known_architectures(None, "tensorrt", [])
    monkeypatch.setattr(nvidia, "probe", lambda: Nvidia(devices=(Device("NVIDIA H200", "9.0", 1),)))
    assert known_architectures(None, "tensorrt", []) == known_architectures(None, "tensorrt", ["sm90"]) == ["sm90"]
    with pytest.raises(RequestError, match="the GPU that is there, sm90: leave --arch out"):
        known_architectures(None, "tensorrt", ["sm89"])


def test_a_library_that_is_not_installed() -> None:
    with pytest.raises(EngineUnavailableError, match=r'tensorrt is not installed: pip install "specdec\[tensorrt\]"'):
        load_library("tensorrt")


def test_memory_is_checked_before_the_build(plain: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ir.load(plain[0] / GRAPH)
    weights = sum(
        value.const_value.size for value in model.graph.initializers.values() if value.const_value is not None
    )
    assert 8 * weights < build_memory(model) - 5 * 2**26 < 9 * weights
    monkeypatch.setattr(bundle_module, "available_memory", lambda: 2**20)
    with pytest.raises(ResourceError, match=r"needs 0\.3 GiB of memory, 0\.0 GiB are available"):
        compile_graph(plain[0], plain[1], "sm89")


def test_the_builder_leaves_the_graph_alone(plain: tuple[Path, ModelSpec]) -> None:
    before = (plain[0] / GRAPH).read_bytes()
    plan = compile_graph(plain[0], plain[1], "sm89").plan
    serialized, counts = build(load_library("tensorrt-rtx"), plain[0] / GRAPH, plain[1], plan)
    assert (plain[0] / GRAPH).read_bytes() == before
    assert serialized.nbytes > 1_000_000
    assert counts.quantize == 0


@pytest.mark.parametrize(
    ("limits", "sizes", "names"),
    [
        ((8, 8192, 64), (8, 512, 64, 8704), ["verify 8 x 64 (logits at 64)", "prefill 1 x 512 (logits at 64)"]),
        ((1, 100, 1), (1, 128, 2, 128), ["verify 1 x 2 (logits at 2)", "prefill 1 x 128 (logits at 2)"]),
    ],
)
def test_profiles_follow_from_the_limits(
    limits: tuple[int, int, int], sizes: tuple[int, ...], names: list[str]
) -> None:
    found = plan_sizes(Limits(max_batch=limits[0], max_length=limits[1], max_tree=limits[2]))
    assert tuple(found.values()) == sizes
    plan = Plan(backend="tensorrt", library="10", architectures=["sm90"], file="x.plan", inputs={}, **found)
    assert [str(profile) for profile in profiles(plan)] == names


def test_a_vendors_message_in_one_line() -> None:
    raw = "IBuilder::build: Error Code 4: Internal Error (x: bad\n shape. In check at /_src/optimizer/a.cpp:12)"
    assert tidy(raw) == "Internal Error (x: bad shape.)"


def to_bfloat16(model: ir.Model) -> None:
    """The graph in bfloat16, its logits in float32."""
    import ml_dtypes

    half, brain = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and value.dtype == half:
            data = value.const_value.numpy().astype(ml_dtypes.bfloat16)
            value.const_value, value.type = ir.Tensor(data, dtype=brain, name=name), ir.TensorType(brain)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype == half:
            value.type = ir.TensorType(brain)
    for node in model.graph:
        if node.op_type == "Cast" and node.attributes.get_int("to") == half:
            node.attributes["to"] = ir.AttrInt64("to", brain)
    logits = model.graph.outputs[0]
    cast = ir.node("Cast", [logits], {"to": ir.DataType.FLOAT})
    wide = cast.outputs[0]
    wide.shape, wide.type = logits.shape, ir.TensorType(ir.DataType.FLOAT)
    logits.name, wide.name = "narrow", "logits"
    model.graph.append(cast)
    model.graph.outputs[0] = wide

"""Quantized bundles, end to end: what is chosen, what is kept, and that speculation changes none of their bits."""

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engines.errors import ExportError, RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import open_engine
from specdec.engines.scoring import score
from specdec.export.grid import Grid, pack_nibbles
from specdec.export.lower_ort import lower_for_ort
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.precision import Prepared, check_keep, dequantize, prepare, quantize_graph, without_rounding
from specdec.export.products import find_products
from specdec.export.recipes import find_recipe
from specdec.export.trace import model_spec, trace
from specdec.export.weights import write_graph
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig
from support import models
from support.bundles import LOGITS_SIZE, quantized_bundle, tiny_checkpoint
from support.trace import recorded_logits

SIZES = {"hidden_size": 64, "intermediate_size": 128}  # whole blocks of 32, and of 64
TOKENS = np.random.default_rng(5).integers(0, 101, 64).tolist()
PROMPTS = [[40, 41, 42, 43, 40, 41, 42, 43, 40, 41], [7, 90, 13], [200, 201, 200, 201, 200, 5]]


@cache
def traced() -> tuple:
    config = models.llama(**SIZES)
    return trace(config), models.random_model(config)


def tiny() -> tuple:
    """Graph and model of a tiny llama, to be changed."""
    graph, model = traced()
    return graph.clone(), copy.deepcopy(model)


def product_names(graph: object) -> set[str]:
    return {name for product in find_products(graph) for name in product.names}


@pytest.mark.parametrize("precision", ["int8", "int4", "int8-w8a8", "fp8"])
def test_every_product_has_a_grid_of_the_recipe(precision: str) -> None:
    graph, model = tiny()
    recipe = find_recipe(precision, ["ort"])
    prepared = prepare(graph, model, recipe, [TOKENS])
    layers = product_names(graph) - {"lm_head.weight"}
    head = {"lm_head.weight", "model.embed_tokens.weight"} if recipe.head else set()
    assert prepared.grids.keys() == layers | head
    for name, grid in prepared.grids.items():
        assert grid.kind == (recipe.head if name in head else recipe.weights)
        assert grid.block == (recipe.block(grid.levels.shape[1]) or grid.levels.shape[1])
        assert (grid.offset is not None) == (recipe.offset and name not in head)
    rounded = {name for name in layers if precision == "fp8" or "down_proj" not in name}
    assert prepared.scales.keys() == (rounded if recipe.activations else set())


def test_what_is_kept_stays_as_it_is() -> None:
    graph, model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = prepare(graph, model, find_recipe("int8", ["ort"]), [TOKENS], keep=["lm_head*", "model.layers.0.*"])
    kept = {name for name in product_names(graph) if name.startswith(("lm_head", "model.layers.0."))}
    assert prepared.grids.keys() == (product_names(graph) | {"model.embed_tokens.weight"}) - kept
    for name in kept:
        torch.testing.assert_close(model.state_dict()[name], before[name], rtol=0, atol=0)


def test_a_pattern_that_keeps_nothing_is_refused() -> None:
    graph, _ = tiny()
    check_keep([graph], ["lm_head*", "model.layers.2.*", "model.embed_tokens.weight", "*.up_proj.weight"])
    with pytest.raises(RequestError, match=r"--keep head\* matches no .*: they are named as model.layers.0.*lm_head"):
        check_keep([graph], ["head*"])
    draft = trace(models.gpt2(n_embd=64))
    check_keep([graph, draft], ["transformer.h.0.*", "model.layers.2.*"])  # of one of the two


def test_nothing_is_folded_into_a_weight_that_is_kept() -> None:
    graph, model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "up_proj" in name}
    prepared = prepare(graph, model, find_recipe("int8", ["ort"]), [TOKENS], keep=["*.up_proj.weight"])
    assert len(before) == 3
    for name, tensor in before.items():
        assert name not in prepared.grids
        torch.testing.assert_close(prepared.weights[name], tensor, rtol=0, atol=0)


def test_an_embedding_on_a_grid_with_offsets_is_read_from_it(tmp_path: Path) -> None:
    graph, model = tiny()
    rng = np.random.default_rng(0)
    levels = rng.integers(-8, 8, (101, 64)).astype(np.int8)
    scale, offset = rng.uniform(0.05, 0.1, (2, 101, 2)).astype(np.float32)
    own = {"model.embed_tokens.weight": Grid("int4", levels, scale, offset)}
    recipe = find_recipe("int4", ["ort"])
    prepared = prepare(graph, model, recipe, [TOKENS], own=own)
    dequantize(model, graph, prepared)
    quantize_graph(graph, recipe, prepared)
    assert "model.embed_tokens.weight" not in graph.graph.initializers
    spec = model_spec(model.config, 101, "float32")
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    for name in ("portable", "lowered"):
        if name == "lowered":
            lower_for_ort(graph, spec)
        path = tmp_path / f"{name}.onnx"
        write_graph(without_rounding(graph), model.state_dict(), path, grids=prepared.grids)
        engine = open_engine(path, spec)
        logits = score(engine, engine.allocate(1, 128), [TOKENS], (len(TOKENS),))[0]
        np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())


def test_an_odd_number_of_nibbles_is_filled_up() -> None:
    packed = pack_nibbles(np.array([[1, -1, 2], [3, 4, -8], [5, 6, 7]], np.int8))
    assert packed.tolist() == [0xF1, 0x32, 0x84, 0x65, 0x07]


def test_a_weight_that_has_a_grid_keeps_it_and_nothing_is_folded_into_it() -> None:
    graph, model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = np.random.default_rng(0)
    own: dict[str, Grid] = {}
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        outputs, inputs = before[name].shape
        levels = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
        own[name] = Grid("int8", levels, np.full((outputs, inputs // 32), 0.01, np.float32))
    prepared = prepare(graph, model, find_recipe("int8", ["ort"]), [TOKENS], own=own)
    for name, grid in own.items():
        assert prepared.grids[name] is grid
        torch.testing.assert_close(prepared.weights[name], before[name], rtol=0, atol=0)
    untouched = ("model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight")
    for name in (*untouched, "model.layers.1.mlp.down_proj.weight"):
        torch.testing.assert_close(prepared.weights[name], before[name], rtol=0, atol=0)
    folded = "model.layers.2.input_layernorm.weight"
    assert not torch.equal(prepared.weights[folded], before[folded])


def test_own_grids_of_other_kinds_are_not_taken() -> None:
    graph, model = tiny()
    name = "model.layers.0.mlp.up_proj.weight"
    coarse = Grid("int4", np.zeros((96, 64), np.int8), np.ones((96, 2), np.float32))
    assert prepare(graph, model, find_recipe("int8", ["ort"]), [TOKENS], own={name: coarse}).grids[name] is not coarse
    fine = Grid("int8", np.zeros((96, 64), np.int8), np.ones((96, 4), np.float32))
    assert prepare(graph, model, find_recipe("int4", ["ort"]), [TOKENS], own={name: fine}).grids[name] is fine


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_pytorch_has_the_weights_of_the_grids(family: str) -> None:
    config = models.gpt2(n_embd=64) if family == "gpt2" else models.FAMILIES[family](**SIZES)
    graph, model = trace(config), models.random_model(config)
    prepared = prepare(graph, model, find_recipe("int4", ["ort"]), [TOKENS])
    dequantize(model, graph, prepared)
    state = model.state_dict()
    for name, grid in prepared.grids.items():
        values = grid.values().T if family == "gpt2" and ".h." in name else grid.values()
        np.testing.assert_array_equal(state[name].numpy(), values)


def test_the_twin_differs_in_rounding_alone() -> None:
    graph, model = tiny()
    recipe = find_recipe("fp8", ["ort"])
    quantize_graph(graph, recipe, prepare(graph, model, recipe, [TOKENS]))
    kinds = [node.op_type for node in without_rounding(graph).graph]
    assert "QuantizeLinear" not in kinds
    assert kinds.count("DequantizeLinear") == 4 * 3  # weights: q/k/v, o, gate/up, down
    assert [node.op_type for node in graph.graph].count("QuantizeLinear") == 4 * 3  # inputs; gate and up share theirs


def test_the_same_model_gives_the_same_grids() -> None:
    def made() -> Prepared:
        graph, model = tiny()
        return prepare(graph, model, find_recipe("int8", ["ort"]), [TOKENS])

    first, second = made(), made()
    for name, grid in first.grids.items():
        np.testing.assert_array_equal(grid.levels, second.grids[name].levels)
        np.testing.assert_array_equal(grid.scale, second.grids[name].scale)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_speculation_changes_no_bit_of_a_quantized_target(precision: str) -> None:
    bundle = quantized_bundle(precision)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with recorded_logits() as expected, LLM(bundle, speculative=SpeculativeConfig(method=None), mode="exact") as plain:
        alone = [plain.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    for method in ("ngram", "model", "layerskip:1"):
        with (
            recorded_logits() as bits,
            LLM(bundle, speculative=SpeculativeConfig(method=method, confidence_threshold=0.0), mode="exact") as llm,
        ):
            outputs = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
            together = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in outputs] == alone
        assert [output.token_ids for output in together] == alone
        assert bits == expected
        assert sum(output.stats.draft_tokens_proposed for output in outputs) > 0


def test_the_manifest_says_what_was_measured() -> None:
    manifest = read_manifest(quantized_bundle("int8"))
    target, draft = manifest.target.variants["int8"], manifest.drafters["model"].model.variants["int4"]
    for variant in (target, draft):
        assert variant.invariance.exact
        assert variant.parity.max_abs_error < variant.parity.tolerance
        assert variant.damage is not None
        assert variant.damage.tokens > 500
        assert 0 < variant.damage.mean_kl < 0.2
    assert target.damage.mean_kl < draft.damage.mean_kl
    hidden, inner, layers = 64, 128, 2
    down = layers * hidden * inner  # in int8 of blocks of 64
    products = layers * (hidden * (64 + 32 + 32) + 64 * hidden + 2 * hidden * inner) + down
    tables = LOGITS_SIZE * hidden  # the LM head; in int8, and so is the embedding if it is not the same
    floats = 4 * hidden * (2 * layers + 1) + 64 * 60  # norms, and alignment
    eight, four = (manifest.files[f"{where}/model.onnx.data"].bytes for where in ("target/int8", "drafter/int4"))
    assert (products + tables) * 1.125 - down / 16 < eight < (products + 2 * tables) * 1.125 - down / 16 + floats
    assert abs(eight - four - products * (1.125 - 0.75) + down / 16) < floats  # 4 bits, scale and offset: 3/4 of a byte


@pytest.mark.slow
def test_two_quantized_exports_are_byte_identical(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny", **SIZES)
    first, second = (
        export_bundle(
            ExportOptions(model=str(checkpoint), output=tmp_path / name, precision="int8", drafters=("none",))
        )
        for name in ("a", "b")
    )
    assert first.files == second.files
    assert first.target.variants["int8"].damage == second.target.variants["int8"].damage


def test_inputs_that_are_not_whole_blocks_are_named(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny")  # 48 hidden channels
    with pytest.raises(ExportError, match=r"48 inputs of model\.layers\.0\..* are not whole blocks of 32.*--keep"):
        export_bundle(ExportOptions(model=str(checkpoint), output=tmp_path / "out", precision="int8"))
    assert not (tmp_path / "out").exists()

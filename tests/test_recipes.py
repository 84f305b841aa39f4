"""The table of precisions: what is refused, and that a refusal says what there is."""

import pytest

from specdec.engines.errors import RequestError
from specdec.export.recipes import BACKENDS, ORT, PRECISIONS, RECIPES, check_arch, find_recipe


def test_every_precision_that_users_script_against_is_there() -> None:
    assert PRECISIONS == ("fp32", "fp16", "bf16", "int8", "int4", "int8-w8a8", "fp8")


def test_every_engine_finds_its_row() -> None:
    for recipe in RECIPES:
        assert set(recipe.engines) <= set(BACKENDS)
        for backend in recipe.engines:
            assert find_recipe(recipe.name, [backend]) is recipe


def test_float_precisions_quantize_nothing() -> None:
    for name in ("fp32", "fp16"):
        recipe = find_recipe(name, BACKENDS)
        assert (recipe.weights, recipe.activations, recipe.head) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "backends", "message"),
    [
        ("int3", ORT, "precision int3 is not known: choose from fp32, fp16, bf16, int8, int4, int8-w8a8, fp8"),
        ("bf16", ORT, "ort does not take precision bf16: it takes fp32, fp16, int8, int4, int8-w8a8, fp8"),
        ("int8", ("ort", "tensorrt-rtx"), "tensorrt-rtx does not take precision int8: it takes fp32, .*, fp8"),
        ("int4", ("ort", "tensorrt"), "int4 is another graph for ort and tensorrt: make one bundle for each"),
    ],
)
def test_what_an_engine_does_not_take_is_refused(name: str, backends: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_recipe(name, backends)


@pytest.mark.parametrize(
    ("name", "arch", "message"),
    [
        ("fp8", "sm86", "fp8 needs compute capability 8.9 or newer, sm86 has 8.6: it takes .*int4, int8-w8a8$"),
        ("bf16", "sm75", "bf16 needs compute capability 8.0 or newer, sm75 has 7.5"),
        ("fp16", "sm61", "fp16 needs compute capability 7.5 or newer, sm61 has 6.1: it takes none"),
        ("fp16", "ada", "architecture ada is not known: name a compute capability, as sm89 for 8.9"),
    ],
)
def test_what_a_gpu_does_not_run_is_refused(name: str, arch: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_arch(find_recipe(name, ["tensorrt"]), arch)


def test_what_a_gpu_runs_is_taken() -> None:
    check_arch(find_recipe("fp8", ["tensorrt-rtx"]), "sm89")
    check_arch(find_recipe("fp8", ["tensorrt-rtx"]), "sm120")


@pytest.mark.parametrize(
    ("precision", "inputs", "block"),
    [("int8", 576, 64), ("int8", 1536, 64), ("int8", 96, 32), ("int8", 64, 32), ("int8", 48, 32), ("int4", 576, 32),
     ("fp8", 576, None), ("fp32", 576, None)],
)  # fmt: skip
def test_blocks_are_as_long_as_divides_a_products_inputs(precision: str, inputs: int, block: int | None) -> None:
    """48 are refused later, by name; 64 are two blocks rather than one."""
    assert find_recipe(precision, ["ort"]).block(inputs) == block

"""The table of precisions: what each stores, computes in, and which engines take it. A new one is a row.

A name may have a row for each kind of engine (int4 has, since engines agree on neither block nor offset). Importable
without torch, so that `--help` and refusals answer at once. This module knows names and numbers; it quantizes nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.engines.contract import Dtype
from specdec.engines.errors import RequestError

Kind = Literal["int8", "int4", "float8e4m3fn"]

ORT = ("ort",)
TENSORRT: tuple[Literal["tensorrt", "tensorrt-rtx"], ...] = ("tensorrt", "tensorrt-rtx")  # compiled ahead of time
BACKENDS: tuple[str, ...] = (*ORT, *TENSORRT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One precision of a model.

    `dtype`: of the cache, of what is computed between products, and of weights that are not quantized. `weights`: type
    of the quantized weights of all products (None: `dtype`). `blocks`: how many inputs of a product share a scale, the
    first number that divides them (none: one scale for each output channel). `offset`: whether a block has an offset
    besides its scale. `activations`: type that products' inputs are rounded to, with one scale for a tensor, fixed by
    calibration (None: they stay as they are). `head`: type of the LM head's weights and the embedding's (None:
    `dtype`). `smoothing`: how much of the range of a product's input moves into its weights, 0 to 1 (None: nothing
    moves). `keeps_own`: whether weights that lie on a block grid already, as a GGUF's, stay on it. `engines`: that take
    it, and `sm`: least compute capability of an NVIDIA GPU (75 is 7.5) that runs it.
    """

    name: str
    dtype: Dtype
    engines: tuple[str, ...]
    weights: Kind | None = None
    blocks: tuple[int, ...] = ()
    offset: bool = False
    activations: Kind | None = None
    head: Kind | None = None
    smoothing: float | None = None
    keeps_own: bool = False
    sm: int = 75

    def block(self, inputs: int) -> int | None:
        """How many of a product's `inputs` share a scale (None: all); the last of `blocks` when none divides them.

        One block alone would be a scale for each output channel, which other operators compute.
        """
        whole = (block for block in self.blocks if inputs % block == 0 and inputs > block)
        return next(whole, self.blocks[-1] if self.blocks else None)


# Blocks of 32 are GGUF's. Those of int8 are longer where they can be: with 8 bits that costs little accuracy, and
# products are faster (docs/performance.md). int8-w8a8 and fp8 run on ONNX Runtime too: as the oracle that a TensorRT
# engine is compared with, not to be fast.
RECIPES = (
    Recipe(name="fp32", dtype="float32", engines=BACKENDS),
    Recipe(name="fp16", dtype="float16", engines=BACKENDS),
    Recipe(name="bf16", dtype="bfloat16", engines=TENSORRT, sm=80),
    Recipe(name="int8", dtype="float32", engines=ORT, weights="int8", blocks=(64, 32), head="int8", smoothing=0.5,
           keeps_own=True),
    Recipe(name="int4", dtype="float32", engines=ORT, weights="int4", blocks=(32,), offset=True, head="int8",
           keeps_own=True),
    Recipe(name="int4", dtype="float16", engines=TENSORRT, weights="int4", blocks=(64,)),
    Recipe(name="int8-w8a8", dtype="float16", engines=BACKENDS, weights="int8", activations="int8", smoothing=0.8),
    Recipe(name="fp8", dtype="float16", engines=BACKENDS, weights="float8e4m3fn", activations="float8e4m3fn", sm=89),
)  # fmt: skip
PRECISIONS = tuple(dict.fromkeys(recipe.name for recipe in RECIPES))


def find_recipe(name: str, backends: Sequence[str]) -> Recipe:
    """The row of `name` that every one of `backends` takes.

    Raises `RequestError` that says which precisions they do take, or that they take the name in different forms.
    """
    if name not in PRECISIONS:
        raise RequestError(f"precision {name} is not known: choose from {', '.join(PRECISIONS)}")
    rows = [recipe for recipe in RECIPES if recipe.name == name]
    for row in rows:
        if set(backends) <= set(row.engines):
            return row
    missing = [backend for backend in backends if not any(backend in row.engines for row in rows)]
    if missing:
        able = dict.fromkeys(recipe.name for recipe in RECIPES if missing[0] in recipe.engines)
        raise RequestError(f"{missing[0]} does not take precision {name}: it takes {', '.join(able)}")
    raise RequestError(f"precision {name} is another graph for {' and '.join(backends)}: make one bundle for each")


def check_arch(recipe: Recipe, arch: str) -> None:
    """Raise `RequestError` unless a GPU of architecture `arch` ("sm89" is compute capability 8.9) runs `recipe`."""
    if not re.fullmatch(r"sm\d{2,3}", arch):
        raise RequestError(f"architecture {arch} is not known: name a compute capability, as sm89 for 8.9")
    sm = int(arch.removeprefix("sm"))
    if sm < recipe.sm:
        able = dict.fromkeys(row.name for row in RECIPES if TENSORRT[0] in row.engines and row.sm <= sm)
        raise RequestError(
            f"precision {recipe.name} needs compute capability {recipe.sm / 10} or newer, {arch} has {sm / 10}: "
            f"it takes {', '.join(able) or 'none'}"
        )

"""RMS norms and rotary embeddings as the single ONNX operators that compute them, recognised by what they compute.

A candidate is run on small random input and compared with the operator's formula; only a match is replaced, anything
else is traced as it is written. This module knows formulas. It knows no family, and whether cos and sin repeat their
first half (as every rotary module of the supported families makes them) is left to the parity gates.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specdec.engines.contract import OPSET

ROTARY = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def single_operators(model: Any) -> Iterator[None]:
    """While open, recognised RMS norms and the rotary function of `model`'s modules emit the operators.

    The norms stay replaced in `model` itself (it is a model made for tracing); the function is put back at the end.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            replace_norm(module)
    sources = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    originals = [(vars(source), vars(source)[ROTARY]) for source in sources.values() if ROTARY in vars(source)]
    for names, original in originals:
        names[ROTARY] = rotary_operator(original)
    try:
        yield
    finally:
        for names, original in originals:
            names[ROTARY] = original


def emit(
    operator: str,
    inputs: Sequence[torch.Tensor],
    like: torch.Tensor,
    *,
    shape: Sequence[int | torch.SymInt] | None = None,
    **attributes: Any,
) -> torch.Tensor:
    """The ONNX operator on `inputs` in the trace; its result has the dtype of `like`, and its shape unless told."""
    size = like.shape if shape is None else shape
    return torch.onnx.ops.symbolic(operator, inputs, attributes, dtype=like.dtype, shape=size, version=OPSET)


def replace_norm(module: nn.Module) -> bool:
    """Make `module` emit RMSNormalization-23 over the last axis if it computes that; return whether it does.

    Two scales are known: the weight (llama) and one plus the weight (gemma).
    """
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    width = module.get_parameter("weight").shape[0]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, width, generator=random) * epsilon**0.5  # [2, 3, H], so small that epsilon counts
    weight = torch.randn(width, generator=random)
    found = torch.func.functional_call(module, {"weight": weight}, (x,))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    for offset in (0.0, 1.0):
        if torch.allclose(found, normed * (offset + weight), rtol=1e-5, atol=1e-6):
            module.forward = _norm_operator(module, offset, epsilon)
            return True
    return False


def rotary_operator(original: Rotary) -> Rotary:
    """`apply_rotary_pos_emb` that emits RotaryEmbedding-23 where `original` turns pairs (i, i + D/2).

    Whether it does so on the whole head, on its first part, or not at all is tried for each; what does not match goes
    to `original`.
    """
    whole, partial = (_rotates_halves(original, rotated, width=16) for rotated in (16, 8))

    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated, width = cos.shape[-1], q.shape[-1]
        if args or kwargs or not (whole if rotated == width else partial):
            return original(q, k, cos, sin, *args, **kwargs)
        half = (cos[..., : rotated // 2], sin[..., : rotated // 2])  # [B, S, D/2] each
        attributes: dict[str, Any] = {} if rotated == width else {"rotary_embedding_dim": rotated}
        turned, turned_k = (emit("RotaryEmbedding", (x, *half), x, **attributes) for x in (q, k))  # [B, H, S, D]
        return turned, turned_k

    return apply


def _norm_operator(module: nn.Module, offset: float, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.get_parameter("weight")
        return emit("RMSNormalization", (x, weight + offset if offset else weight), x, axis=-1, epsilon=epsilon)

    return forward


def _rotates_halves(function: Rotary, rotated: int, width: int) -> bool:
    """Whether `function` rotates the first `rotated` of `width` channels by halves and passes the rest."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, width, generator=random) for heads in (4, 2))  # [B, H, S, D]
    cos, sin = (torch.randn(2, 3, rotated // 2, generator=random) for _ in range(2))  # [B, S, D/2]

    def expected(x: torch.Tensor) -> torch.Tensor:
        c, s = cos[:, None], sin[:, None]
        first, second, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
        return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)

    try:
        found = function(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    except RuntimeError:  # shapes that the function does not take: it is not this rotation
        return False
    return all(torch.allclose(a, expected(b), atol=1e-5) for a, b in zip(found, (q, k), strict=True))

"""Norms and rotary embeddings become single operators when, and only when, they compute them."""

import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from specdec.export import operators
from support import models


class CentredRMSNorm(nn.Module):
    """Subtracts the mean first: a layer norm by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class ForgetfulRMSNorm(nn.Module):
    """Says that it has an epsilon and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def test_norms_are_known_by_what_they_compute() -> None:
    assert operators.replace_norm(modeling_llama.LlamaRMSNorm(8))
    assert operators.replace_norm(Gemma3RMSNorm(8))
    for other in (CentredRMSNorm(), ForgetfulRMSNorm(), nn.LayerNorm(8)):
        forward = other.forward
        assert not operators.replace_norm(other)
        assert other.forward == forward


def interleaved(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns neighbours (2 i, 2 i + 1), as another convention has it."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    return turn(q), turn(k)


def rotary_inputs(rotated: int, width: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 4, 3, width, generator=random), torch.randn(1, 2, 3, width, generator=random)
    cos, sin = (torch.randn(1, 3, rotated // 2, generator=random).repeat(1, 1, 2) for _ in range(2))
    return q, k, cos, sin


def emitted(monkeypatch, function, inputs) -> list[dict[str, int]]:  # type: ignore[no-untyped-def]
    """Attributes of the operators that the replaced `function` emits."""
    calls: list[dict[str, int]] = []

    def emit(name: str, given: tuple[torch.Tensor, ...], like: torch.Tensor, **attributes: int) -> torch.Tensor:
        assert name == "RotaryEmbedding"
        calls.append(attributes)
        return like

    monkeypatch.setattr(operators, "emit", emit)
    operators.rotary_operator(function)(*inputs)
    return calls


def test_half_rotation_is_known_on_whole_and_partial_heads(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    whole, partial = rotary_inputs(8, 8), rotary_inputs(4, 8)
    assert emitted(monkeypatch, modeling_llama.apply_rotary_pos_emb, whole) == [{}, {}]
    assert emitted(monkeypatch, modeling_phi3.apply_rotary_pos_emb, partial) == [{"rotary_embedding_dim": 4}] * 2


def test_other_rotations_are_traced_as_they_are(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    inputs = rotary_inputs(8, 8)
    assert emitted(monkeypatch, interleaved, inputs) == []
    kept = operators.rotary_operator(interleaved)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, interleaved(*inputs), strict=True))


def test_the_familys_function_is_put_back() -> None:
    original = modeling_llama.apply_rotary_pos_emb
    model = models.random_model(models.llama())
    try:
        with operators.single_operators(model):
            assert modeling_llama.apply_rotary_pos_emb is not original
            raise InterruptedError
    except InterruptedError:
        pass
    assert modeling_llama.apply_rotary_pos_emb is original

"""Prompts are read or refused; statistics are what the products of a model were fed, and the same again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engines.errors import ExportError, SourceError
from specdec.export.calibrate import TEXTS, Statistics, collect, read_prompts
from support import models

PROMPTS = [[5, 17, 3, 99, 4, 4, 60], [7], [], [1, 2, 3, 4]]
TOKENS = 12


def inputs_of(model: Any, name: str) -> np.ndarray:
    """What the module of the weight `name` reads over all prompts, [T, K]."""
    seen: list[torch.Tensor] = []
    module = model.get_submodule(name.removesuffix(".weight"))
    handle = module.register_forward_hook(lambda _, given, __: seen.append(given[0][0]))
    for prompt in PROMPTS:
        if prompt:
            model(input_ids=torch.tensor([prompt]), use_cache=False)
    handle.remove()
    return torch.cat(seen).numpy()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (models.llama, "model.layers.1.self_attn.k_proj.weight"),
        (models.llama, "model.layers.2.mlp.down_proj.weight"),
        (models.qwen2, "lm_head.weight"),
        (models.gpt2, "transformer.h.0.mlp.c_proj.weight"),
    ],
)
def test_statistics_are_those_of_the_inputs(family: Callable[[], Any], name: str) -> None:
    model = models.random_model(family())
    found = collect(model, PROMPTS)[name]
    x = inputs_of(model, name)
    assert found.tokens == len(x) == TOKENS
    np.testing.assert_array_equal(found.maximum, np.abs(x).max(0))
    np.testing.assert_allclose(found.mean_square, np.square(x).mean(0), rtol=1e-5)
    assert found.counts.sum() == x.size
    assert np.all(np.diff(found.magnitudes) > 0)
    assert found.percentile(100) == np.abs(x).max()
    for percent in (1, 50, 99):
        exact = np.quantile(np.abs(x), percent / 100, method="inverted_cdf")
        assert found.percentile(percent) == pytest.approx(exact, rel=2**-8)


def test_every_product_is_named_as_its_weight_and_equal_inputs_are_shared() -> None:
    model = models.random_model(models.llama())
    found = collect(model, PROMPTS)
    state = model.state_dict()
    assert set(found) == {name for name, weight in state.items() if weight.dim() == 2 and "embed" not in name}
    layer = "model.layers.0"
    assert found[f"{layer}.self_attn.q_proj.weight"] is found[f"{layer}.self_attn.v_proj.weight"]
    assert found[f"{layer}.mlp.gate_proj.weight"] is found[f"{layer}.mlp.up_proj.weight"]
    assert found[f"{layer}.mlp.up_proj.weight"] is not found[f"{layer}.mlp.down_proj.weight"]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_same_run_gives_the_same_bits() -> None:
    def run() -> list[bytes]:
        found = collect(models.random_model(models.gemma3()), PROMPTS).values()
        return [b"".join(array.tobytes() for array in arrays(statistics)) for statistics in found]

    assert run() == run()


def arrays(statistics: Statistics) -> list[np.ndarray]:
    return [getattr(statistics, name) for name in ("maximum", "mean_square", "magnitudes", "counts")]


def test_nothing_to_run_and_broken_numbers_are_refused() -> None:
    model = models.random_model(models.llama())
    with pytest.raises(ExportError, match="calibration has seen no token"):
        collect(model, [[]])
    model.model.layers[1].input_layernorm.weight[3] = float("inf")
    with pytest.raises(ExportError, match=r"inputs of model\.layers\.1\.self_attn\.q_proj\.weight are not finite"):
        collect(model, PROMPTS)


def test_the_texts_here_are_short_and_differ() -> None:
    assert len(set(TEXTS)) == len(TEXTS) == 16
    assert all(40 < len(text) < 500 for text in TEXTS)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"question_id": 1, "turns": ["a b", "c"]}\n\n{"prompt": "d"}\n{"text": "e", "id": 0}\n',
            ["a b", "c", "d", "e"],
        ),
        ("First line\nsecond line.\n\n\n  Another. \n", ["First line\nsecond line.", "Another."]),
    ],
)
def test_prompts_are_read(tmp_path: Path, content: str, expected: list[str]) -> None:
    (tmp_path / "prompts").write_text(content, "utf-8")
    assert read_prompts(tmp_path / "prompts") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no text: give JSON lines with turns, prompt, text, or paragraphs"),
        (b' \n{"turns": []}', "has no text"),
        (b'{"turns": ["a"]}\n{"turns": ', r"line 2 is not JSON"),
        (b'{"question": "a"}', r"line 1 has none of the fields turns, prompt, text"),
        (b'{"turns": "a"}\n["b"]', r"line 2 has none of the fields"),
        (b'{"turns": [1]}', r"line 1: turns is not text"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_broken_prompts_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(SourceError, match=message) as failure:
        read_prompts(tmp_path / "prompts")
    assert "\n" not in str(failure.value)


def test_missing_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read: No such file or directory"):
        read_prompts(tmp_path / "nowhere")

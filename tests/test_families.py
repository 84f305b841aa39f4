"""What cannot be exported is refused by name, before anything is traced."""

from typing import Any

import pytest
import transformers

from specdec.engines.errors import UnsupportedModelError
from specdec.export import trace as trace_module
from specdec.export.families import FAMILIES, check_supported
from support import models


def refused(config: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_tested_families_are_supported(family: str) -> None:
    check_supported(models.FAMILIES[family]())


def test_every_supported_family_has_a_tiny_model() -> None:
    assert {make().model_type for make in models.FAMILIES.values()} == set(FAMILIES)


REFUSALS = [
    ("Gemma2Config", {}, "gemma2 uses attention soft-capping (attn_logit_softcapping=50.0)"),
    ("Gemma3TextConfig", {"attn_logit_softcapping": 30.0}, "gemma3_text uses attention soft-capping"),
    ("BloomConfig", {}, "bloom uses ALiBi position biases"),
    ("MptConfig", {}, "mpt uses ALiBi position biases"),
    ("FalconConfig", {"alibi": True}, "falcon uses ALiBi position biases (alibi=True)"),
    ("GptOssConfig", {"num_local_experts": 0}, "gpt_oss uses attention sinks"),
    ("GptOssConfig", {}, "gpt_oss uses a mixture of experts"),
    ("MixtralConfig", {}, "mixtral uses a mixture of experts (num_local_experts=8)"),
    ("Qwen3MoeConfig", {}, "qwen3_moe uses a mixture of experts"),
    ("T5Config", {}, "t5 uses an encoder and a decoder"),
    ("BartConfig", {}, "bart uses an encoder and a decoder"),
    ("MambaConfig", {}, "mamba uses state-space or linear attention layers"),
    ("Qwen3NextConfig", {}, "qwen3_next uses state-space or linear attention layers"),
    ("DeepseekV3Config", {"n_routed_experts": 0}, "deepseek_v3 uses multi-head latent attention"),
    ("Llama4TextConfig", {"num_local_experts": 0}, "llama4_text uses chunked attention"),
    ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "llama uses length-dependent rotary embeddings (rope_type=dynamic)"),
    ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}, "gpt2 uses attention that is scaled by layer or upcast"),
    ("GPT2Config", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
    ("GPT2Config", {"add_cross_attention": True}, "gpt2 uses cross attention"),
    ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "gemma3_text uses attention to later tokens"),
    ("LlamaConfig", {"is_causal": False}, "llama uses attention to later tokens (is_causal=False)"),
    ("Gemma3Config", {}, "gemma3 uses images or sound beside text"),
    ("GPTNeoXConfig", {}, "the family 'gpt_neox' is not supported; supported are gemma3_text, gpt2, llama"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "message"), REFUSALS)
def test_refusals_name_family_and_feature(name: str, settings: dict[str, Any], message: str) -> None:
    assert message in refused(getattr(transformers, name)(**settings))


def test_length_dependent_rope_of_phi3() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, **factors}
    assert "rope_type=longrope" in refused(models.phi3(rope_parameters={**rope, "partial_rotary_factor": 1.0}))


def test_heads_and_layers_of_other_kinds() -> None:
    config = models.llama()
    config.__dict__["num_key_value_heads"] = [2, 1, 2]
    assert "another number or size of heads from layer to layer (num_key_value_heads=[2, 1, 2])" in refused(config)
    config = models.qwen3()
    config.__dict__["layer_types"] = ["full_attention", "odd_attention", "full_attention"]
    assert "a layer type that is not known (layer 1 is odd_attention)" in refused(config)
    config = models.llama()
    config.__dict__["rope_parameters"] = {"rope_type": "spiral"}
    assert "a rotary embedding that is not known (rope_type=spiral)" in refused(config)


def test_refusal_comes_before_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_empty_model", lambda *_: pytest.fail("tracing began"))
    with pytest.raises(UnsupportedModelError):
        trace_module.trace(transformers.Gemma2Config())

"""Which checkpoints can be exported: families that have a parity test here, without features the graph cannot hold.

Everything is decided from the configuration, before any tracing; a refusal names the feature and says why in one
line. A new family is a name in `FAMILIES` and a tiny model in the tests. This module knows configurations only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from specdec.engines.errors import UnsupportedModelError

FAMILIES = ("gemma3_text", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not change with the length
LAYER_TYPES = ("full_attention", "sliding_attention")

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STATE_SPACE = ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "falcon_h1", "rwkv", "xlstm",
                "recurrent_gemma", "nemotron_h", "granitemoehybrid", "lfm2")  # fmt: skip
_LATENT = ("kv_lora_rank",)
_ALIBI_ONLY = ("bloom", "mpt")
_SINKS = ("gpt_oss",)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A feature that no graph of contract version 1 can hold: how it shows in a configuration, and why not."""

    found: Callable[[Any], str | None]  # config -> where it was seen, None when it is absent
    feature: str
    reason: str


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the causal language model in `config`: itself, or the text part of a larger one."""
    return config.get_text_config(decoder=True)


def check_supported(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError` for a family or feature that cannot be exported; the message names it."""
    family = config.model_type
    for obstacle in OBSTACLES:
        seen = obstacle.found(config)
        if seen is not None:
            raise UnsupportedModelError(f"{family} uses {obstacle.feature} ({seen}): {obstacle.reason}")
    if family not in FAMILIES:
        raise UnsupportedModelError(f"the family {family!r} is not supported; supported are {', '.join(FAMILIES)}")


def _setting(*names: str) -> Callable[[Any], str | None]:
    """Seen when one of the settings is there and not off (None, False, 0)."""

    def found(config: Any) -> str | None:
        for name in names:
            value = getattr(config, name, None)
            if value:
                return f"{name}={value}" if isinstance(value, (bool, int, float, str)) else name
        return None

    return found


def _family(*names: str) -> Callable[[Any], str | None]:
    return lambda config: "every model of this family" if config.model_type in names else None


def _any(*tests: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda config: next((seen for test in tests if (seen := test(config)) is not None), None)


def _alibi(config: Any) -> str | None:
    inner = getattr(config, "attn_config", None)
    return "alibi=True" if getattr(config, "alibi", False) or getattr(inner, "alibi", False) else None


def _layer_type(*wanted: str) -> Callable[[Any], str | None]:
    def found(config: Any) -> str | None:
        types = getattr(config, "layer_types", None) or ()
        return next((f"layer {index} is {kind}" for index, kind in enumerate(types) if kind in wanted), None)

    return found


def _other_layer_type(config: Any) -> str | None:
    types = getattr(config, "layer_types", None) or ()
    return next((f"layer {index} is {kind}" for index, kind in enumerate(types) if kind not in LAYER_TYPES), None)


def _rope_types(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for group in nested or [parameters]:
        if group:
            yield group.get("rope_type", "default")


def _rope(*wanted: str) -> Callable[[Any], str | None]:
    return lambda config: next((f"rope_type={kind}" for kind in _rope_types(config) if kind in wanted), None)


def _other_rope(config: Any) -> str | None:
    return next((f"rope_type={kind}" for kind in _rope_types(config) if kind not in ROPE_TYPES), None)


def _varying_heads(config: Any) -> str | None:
    for name in ("num_key_value_heads", "num_attention_heads", "head_dim"):
        if isinstance(getattr(config, name, None), (list, tuple, dict)):
            return f"{name}={getattr(config, name)}"
    return None


def _not_causal(config: Any) -> str | None:
    if getattr(config, "is_causal", True) is False:
        return "is_causal=False"
    return _setting("use_bidirectional_attention")(config)


OBSTACLES = (
    Obstacle(
        _setting("is_encoder_decoder"),
        "an encoder and a decoder",
        "the contract is a causal language model that reads its prompt as its own past",
    ),
    Obstacle(
        _setting("vision_config", "audio_config"),
        "images or sound beside text",
        "only text models are exported (of gemma3, those whose model_type is gemma3_text)",
    ),
    Obstacle(
        _any(_family(*_STATE_SPACE), _layer_type("linear_attention", "mamba", "conv", "recurrent")),
        "state-space or linear attention layers",
        "their state is rewritten at every token and cannot be rolled back by an integer",
    ),
    Obstacle(
        _setting(*_EXPERTS),
        "a mixture of experts",
        "its router sends tokens by their content, which the traced graph cannot hold yet",
    ),
    Obstacle(
        _setting(*_LATENT),
        "multi-head latent attention",
        "its cache is a compressed latent, the contract's is keys and values by head",
    ),
    Obstacle(
        _setting("attn_logit_softcapping", "attn_logit_softcap"),
        "attention soft-capping",
        "engines have no soft-capped attention operator that all agree on, and dropping the cap changes the model",
    ),
    Obstacle(
        _any(_family(*_ALIBI_ONLY), _alibi),
        "ALiBi position biases",
        "the contract's attention mask is boolean and has no room for a bias by distance",
    ),
    Obstacle(
        _family(*_SINKS),
        "attention sinks",
        "the learned extra term of the softmax is not in ONNX Attention",
    ),
    Obstacle(
        _layer_type("chunked_attention"),
        "chunked attention",
        "a token sees its own chunk of positions only, which the contract's mask does not know",
    ),
    Obstacle(
        _other_layer_type,
        "a layer type that is not known",
        f"known are {', '.join(LAYER_TYPES)}",
    ),
    Obstacle(
        _rope("dynamic", "longrope"),
        "length-dependent rotary embeddings",
        "cached keys would have to be turned again when the text grows",
    ),
    Obstacle(
        _other_rope,
        "a rotary embedding that is not known",
        f"known are {', '.join(ROPE_TYPES)}",
    ),
    Obstacle(
        _varying_heads,
        "another number or size of heads from layer to layer",
        "all cache tensors of the contract have one shape",
    ),
    Obstacle(
        _setting("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
        "attention that is scaled by layer or upcast",
        "the traced attention has one scale and one precision",
    ),
    Obstacle(
        _setting("add_cross_attention"),
        "cross attention",
        "there is no encoder whose output it could read",
    ),
    Obstacle(
        _not_causal,
        "attention to later tokens",
        "speculation needs every logit to depend on earlier tokens only",
    ),
)

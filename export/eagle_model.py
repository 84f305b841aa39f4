"""EAGLE's drafter in PyTorch: one decoder layer over pairs of a token and the hidden state before it.

Pair t joins what the target knew at token t with token t + 1 (pending, as yet unseen), and predicts token t + 2. Two
kinds are public:

- `eagle` (Li et al., arXiv:2401.15077): x = fc([embed(token); f]) with f the state that the target's head reads; the
  layer has no norm before its attention, and its output is both the next f and what the target's head reads.
- `eagle3` (Li et al., arXiv:2503.01840): g = fc(states after a few of the target's layers), or what the drafter itself
  left; the layer attends [norm(embed(token)); norm(g)], and a head of its own reads norm(output), over a draft
  vocabulary of `d2t` (target id = i + d2t[i]).

This module knows the drafter's own mathematics; it knows no file, no graph, no training and no bundle.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specdec.export.families import text_config

Format = Literal["eagle", "eagle3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A drafter's shape. `llama`: sizes of its one layer, the target's `hidden_size` and `vocab_size`.

    `taps`: hidden states of the target that it reads, "final" or after how many layers. `draft_vocab_size`: tokens that
    its head knows. `bias`: whether `fc` has one.
    """

    llama: LlamaConfig
    format: Format = "eagle3"
    taps: tuple[str, ...]
    draft_vocab_size: int
    bias: bool = False

    @property
    def tapped_size(self) -> int:
        """Size of what it reads of the target at a token: T * H."""
        return len(self.taps) * int(self.llama.hidden_size)


class Drafted(NamedTuple):
    """What a pass leaves: `own` [B, S, H], the states that self-fed pairs go on from, and `logits` [B, S, Vd]."""

    own: torch.Tensor
    logits: torch.Tensor


def eagle_config(target: PretrainedConfig, *, draft_vocab_size: int | None = None, **changes: Any) -> EagleConfig:
    """The `eagle3` drafter of a target's own sizes, reading its default taps; `changes`: fields of `EagleConfig`.

    Layer sizes come from the target where it has them, of llama's kind (RMS norms, gated MLP, rotary positions).
    """
    text: Any = text_config(target)
    heads, names = text.num_attention_heads, ("rms_norm_eps", "rope_parameters", "head_dim")
    llama = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=False,
        **{name: value for name in names if (value := getattr(text, name, None)) is not None},
    )
    wanted = {"taps": default_taps(text.num_hidden_layers), **changes}
    return EagleConfig(llama=llama, draft_vocab_size=draft_vocab_size or text.vocab_size, **wanted)


def default_taps(layers: int) -> tuple[str, ...]:
    """The low, middle and high taps of the reference implementation, for a target of so many layers.

    A target too shallow for them has fewer.
    """
    wanted = (min(2, layers), max(layers // 2, 1), max(layers - 3, 1))
    return tuple(str(tap) for tap in sorted(set(wanted)))


class EagleLayer(nn.Module):
    """The decoder layer: Llama's, but for what its attention reads. [B, S, H] -> [B, S, H]."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        llama = config.llama
        size, epsilon, self.joins = llama.hidden_size, llama.rms_norm_eps, config.format == "eagle3"
        if self.joins:
            self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, epsilon), LlamaRMSNorm(size, epsilon)
        self.self_attn = LlamaAttention(llama, 0)
        if self.joins:
            for name in ("q_proj", "k_proj", "v_proj"):
                outputs = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(2 * size, outputs, bias=llama.attention_bias))
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        self.mlp = LlamaMLP(llama)  # type: ignore[no-untyped-call]

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """embedded [B, S, H] is read by the attention of `eagle3` alone; `attention`: of `LlamaAttention`."""
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1) if self.joins else hidden
        hidden = hidden + self.self_attn(read, **attention)[0]
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleModel(nn.Module):
    """The drafter of `config`; its state dict has the public names of the format, `d2t` and `t2d` apart.

    Embedding and head are always there; who builds it gives them the target's values where the files have none.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        llama, size = config.llama, config.llama.hidden_size
        self.settings = config
        self.config = llama
        self.set_attn_implementation("sdpa")
        self.embed_tokens = nn.Embedding(llama.vocab_size, size)
        self.fc = nn.Linear(config.tapped_size if config.format == "eagle3" else 2 * size, size, bias=config.bias)
        layer = EagleLayer(config)
        if config.format == "eagle3":
            self.midlayer, self.norm = layer, LlamaRMSNorm(size, llama.rms_norm_eps)
        else:
            self.layers = nn.ModuleList([layer])
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config=llama)

    def set_attn_implementation(self, name: str) -> None:
        """Attend by the function that transformers has under this name."""
        self.config._attn_implementation = name

    def states(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None = None,
        own: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The states [B, S, H] that the layer leaves at S pairs of each row.

        tokens [B, S]: the later token of each pair. features [B, S, T * H]: the target's states at the earlier one.
        own [B, S, H]: what a pass has left there, for self-fed pairs. One of the two is given, or both with zeros where
        the other counts. positions [B, S]: of the earlier tokens (None: 0, 1, 2, ...). mask [B or 1, 1, S, K]: True
        where a pair sees one of the K pairs that the cache then has (None: each sees itself and those before it, if
        there is no cache; all of the cache, if S is 1). `cache` gets this pass's keys and values appended.
        """
        embedded = self.embed_tokens(tokens)  # [B, S, H]
        if self.settings.format == "eagle3":
            hidden = _sum(None if features is None else self.fc(features), own)
        else:
            hidden = self.fc(torch.cat([embedded, _sum(features, own)], -1))
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        layer = self.midlayer if self.settings.format == "eagle3" else self.layers[0]
        turned = self.rotary_emb(embedded, positions)
        output: torch.Tensor = layer(embedded, hidden, position_embeddings=turned, attention_mask=mask, cache=cache)
        return output

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd] of the token after each pair, from the states [..., H] that the layer left."""
        read = self.norm(states) if self.settings.format == "eagle3" else states
        scores: torch.Tensor = self.lm_head(read)
        return scores

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None = None,
        own: torch.Tensor | None = None,
        **options: Any,
    ) -> Drafted:
        """`states` with its options, and their logits."""
        left = self.states(tokens, features, own, **options)
        return Drafted(left, self.logits(left))


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor:
    present = [states for states in (left, right) if states is not None]
    return present[0] if len(present) == 1 else present[0] + present[1]

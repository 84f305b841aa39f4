"""The contract's side of a traced model: what stands in for attention, mask and cache while its code is run.

`ContractModule` runs a causal language model on one chunk; attention writes keys and values at `past_lens` into the
cache inputs and attends over them, masks come from `past_lens`, `chunk_mask` and positions, and hidden states are
gathered at `logit_indices` before the head. This module knows the hooks that transformers offers; it knows no family.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from specdec.engines.errors import UnsupportedModelError
from specdec.export.operators import emit

NAME = "specdec_in_place"
BEYOND_ATTENTION = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")  # arguments that change the softmax


@contextmanager
def contract_attention(model: Any) -> Iterator[None]:
    """While open, `model` attends as `ContractModule` needs it; transformers' registries are put back at the end."""
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _contract_mask)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(NAME, None)


class ChunkCache(Cache):
    """Hands new keys and values through: the cache lives in the graph's inputs."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class Round:
    """The chunk that is being traced: its inputs, and the masks and cache outputs that come into being."""

    def __init__(
        self, position_ids: torch.Tensor, past_lens: torch.Tensor, chunk_mask: torch.Tensor, past: list[torch.Tensor]
    ) -> None:
        self.position_ids = position_ids  # [B, S]
        self.past_lens = past_lens  # [B]
        self.chunk_mask = chunk_mask  # [B, S, S]
        self.past = past  # 2 L of [B, H_kv, C, D]
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """[B, 1, S, C]: slot t is committed, or in the chunk and allowed by `chunk_mask`, and inside the window."""
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def _mask(self, window: int | None) -> torch.Tensor:
        rows, width = self.position_ids.shape
        capacity = self.past[0].shape[2]
        slot = torch.arange(capacity).unsqueeze(0)  # [1, C]
        past_lens = self.past_lens.unsqueeze(1)  # [B, 1]
        committed = slot < past_lens  # [B, C]
        local = slot - past_lens  # [B, C]: index of a slot in the chunk
        inside = (local >= 0) & (local < width)
        index = local.clamp(0, width - 1)
        allowed = self.chunk_mask.gather(2, index.unsqueeze(1).expand(rows, width, capacity))  # [B, S, C]
        visible = committed.unsqueeze(1) | (inside.unsqueeze(1) & allowed)
        if window is not None:
            position = torch.where(committed, slot, self.position_ids.gather(1, index))  # [B, C]
            visible = visible & (self.position_ids.unsqueeze(2) - position.unsqueeze(1) < window)
        return visible.unsqueeze(1)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The cache outputs, in the contract's order."""
        return tuple(tensor for layer in sorted(self.present) for tensor in self.present[layer])


_round: ContextVar[Round] = ContextVar("specdec_round")


@contextmanager
def running_chunk(
    position_ids: torch.Tensor, past_lens: torch.Tensor, chunk_mask: torch.Tensor, past: list[torch.Tensor]
) -> Iterator[Round]:
    """While open, attention works on this chunk and leaves its cache outputs in what is given."""
    now = Round(position_ids, past_lens, chunk_mask, past)
    token = _round.set(now)
    try:
        yield now
    finally:
        _round.reset(token)


def at_indices(hidden: torch.Tensor, logit_indices: torch.Tensor) -> torch.Tensor:
    """hidden [B, S, H], logit_indices [B, N] -> [B, N, H]."""
    shape = (*logit_indices.shape, hidden.shape[-1])
    return emit("GatherND", (hidden, logit_indices.unsqueeze(2)), hidden, shape=shape, batch_dims=1)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, S, D], key and value [B, Hkv, S, D] -> [B, S, Hq, D]; writes at past_lens, attends the buffers."""
    refused = next((name for name in BEYOND_ATTENTION if options.get(name) is not None), None)
    if refused is not None:
        raise UnsupportedModelError(f"{type(module).__name__} attends with {refused}, which ONNX Attention cannot hold")
    now = _round.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    buffers = now.past[2 * layer : 2 * layer + 2]

    keys, values = (
        emit("TensorScatter", (buffer, new, now.past_lens), buffer, axis=2, mode="linear")
        for buffer, new in zip(buffers, (key, value), strict=True)
    )
    now.present[layer] = (keys, values)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    output = emit("Attention", (query, keys, values, attention_mask), query, scale=scale)
    return output.transpose(1, 2), None


def _contract_mask(*, local_size: int | None = None, **_: Any) -> torch.Tensor:
    return _round.get().mask(local_size)


class ContractModule(nn.Module):
    """The family's model behind the inputs and outputs of contract version 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_lens: torch.Tensor,
        chunk_mask: torch.Tensor,
        logit_indices: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:

        def gather(_: nn.Module, __: Any, output: Any) -> Any:
            output.last_hidden_state = at_indices(output.last_hidden_state, logit_indices)
            return output

        hook = self.model.base_model.register_forward_hook(gather)
        try:
            with running_chunk(position_ids, past_lens, chunk_mask, past) as now:
                given = {"input_ids": input_ids, "position_ids": position_ids}
                logits = self.model(**given, cache=ChunkCache(), use_cache=True).logits
        finally:
            hook.remove()
        if logits.dtype == torch.bfloat16:  # which numpy does not have
            logits = logits.float()
        return (logits, *now.outputs())

"""Engine contract, version 1: the tensors of a model graph, the model's shape, and one chunk of work.

Every backend runs the same graph inputs and outputs. KV slots are fixed and written in place; what a row holds is what
lies below `past_lens[row]`, so rolling back is passing a smaller number. This module knows shapes and names only: no
engine, no sampling, no files.

Tensors (B rows, S chunk tokens, N positions with logits, C cache capacity, V logits size, F features):

=============================  ==============  ===============================================================
`input_ids`                    int64 [B, S]    tokens of this chunk; shorter rows are right-padded
`position_ids`                 int64 [B, S]    position of each token: past length + depth in the token tree
`past_lens`                    int64 [B]       committed tokens in the cache = first slot that this chunk writes
`chunk_mask`                   bool [B, S, S]  `[b, i, j]`: token i attends token j (itself and its ancestors)
`logit_indices`                int64 [B, N]    chunk positions that get logits
`features` (drafters)          float [B, S, F]: what the target's layers left at the token before each of the chunk's
`past_key_values.{l}.key`      float [B, H_kv, C, D], likewise `.value`: the cache buffers
`logits`                       float [B, N, V], float32 in a bfloat16 graph
`hidden` (optional)            float [B, S, taps * hidden size]: hidden states of every token, one tap after another
`present.{l}.key`              float [B, H_kv, C, D], likewise `.value`: bound to the memory of the inputs
=============================  ==============  ===============================================================
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from specdec.engines.errors import ContractError

CONTRACT_VERSION = 1
OPSET = 24

CHUNK_INPUTS = ("input_ids", "position_ids", "past_lens", "chunk_mask", "logit_indices")
LOGITS = "logits"
HIDDEN = "hidden"
FEATURES = "features"

Dtype = Literal["float32", "float16", "bfloat16"]
ITEMSIZE: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes; numpy has no bfloat16
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.floating]

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of one model as its engine sees it; stored in the manifest.

    `vocab_size` counts the ids that the tokenizer knows; logits from there up to `logits_size` are padding of the
    checkpoint and are never emitted. (A drafter of a reduced vocabulary knows more ids than it has logits, which are in
    an order of their own.) `max_length` is the largest number of tokens (prompt and answer) of a row.
    `taps`: where the hidden states of the output `hidden` are read, in its order: "final" is what the head reads, "7"
    what the first seven layers leave. `features`: size F of the input `features`; 0: there is none.
    """

    num_layers: _Positive
    num_kv_heads: _Positive
    head_dim: _Positive
    hidden_size: _Positive
    logits_size: _Positive
    vocab_size: _Positive
    max_length: _Positive
    dtype: Dtype = "float32"
    taps: tuple[str, ...] = ()
    features: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def tapped_size(self) -> int:
        """Size of a token's hidden states at all taps."""
        return len(self.taps) * self.hidden_size

    def tap(self, name: str) -> slice:
        """Where a token's hidden state at the tap `name` lies among those of all taps."""
        start = self.taps.index(name) * self.hidden_size
        return slice(start, start + self.hidden_size)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs beside the cache, in graph order."""
        return (*CHUNK_INPUTS, FEATURES) if self.features else CHUNK_INPUTS

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs beside the cache, in graph order."""
        return (LOGITS, HIDDEN) if self.taps else (LOGITS,)

    def kv_bytes(self, rows: int, capacity: int) -> int:
        """Bytes of the cache buffers of `rows` rows and `capacity` slots."""
        return 2 * self.num_layers * rows * self.num_kv_heads * capacity * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def logits_dtype(self) -> Dtype:
        """Type of the logits: the graph's own, but float32 where numpy has no such type."""
        return "float32" if self.dtype == "bfloat16" else self.dtype


class HeadsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of Medusa heads, a graph of its own: `features` [B, hidden_size] in, `logits` [B, heads, logits_size] out.

    `features`: the target's last hidden state at a token, behind the final norm (the tap "final").
    """

    heads: _Positive
    hidden_size: _Positive
    logits_size: _Positive
    dtype: Dtype = "float32"


def tap_columns(taps: Sequence[str], size: int, wanted: Sequence[str]) -> IntArray:
    """Where the hidden states at the taps `wanted` lie, in their order, among those at `taps`, of `size` each."""
    return np.concatenate([np.arange(size) + taps.index(tap) * size for tap in wanted])


def past_names(num_layers: int) -> Iterator[str]:
    """Names of the cache inputs, in graph order: key and value of layer 0, of layer 1, ..."""
    return (f"past_key_values.{layer}.{part}" for layer in range(num_layers) for part in ("key", "value"))


def present_names(num_layers: int) -> Iterator[str]:
    """Names of the cache outputs, in the order of `past_names`."""
    return (f"present.{layer}.{part}" for layer in range(num_layers) for part in ("key", "value"))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One pass of work for B rows, S tokens each; the arrays are C-contiguous and read only by the engine."""

    input_ids: IntArray  # [B, S]
    position_ids: IntArray  # [B, S]
    past_lens: IntArray  # [B]
    chunk_mask: BoolArray  # [B, S, S]
    logit_indices: IntArray  # [B, N]
    features: FloatArray | None = None  # [B, S, F], if the model takes them

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return int(self.input_ids.shape[0])

    @property
    def width(self) -> int:
        """Number of tokens S per row, padding included."""
        return int(self.input_ids.shape[1])

    def validate(self, spec: ModelSpec, rows: int, capacity: int) -> None:
        """Raise `ContractError` unless shapes agree and every slot that is written exists.

        `rows` and `capacity` are those of the cache that the chunk runs on.
        """
        b, s = self.input_ids.shape
        shapes = (self.position_ids.shape, self.past_lens.shape, self.chunk_mask.shape, self.logit_indices.shape[:1])
        if shapes != ((b, s), (b,), (b, s, s), (b,)) or self.logit_indices.ndim != 2:
            raise ContractError(f"chunk shapes disagree: input_ids {(b, s)}, others {shapes}")
        given, wanted = None if self.features is None else self.features.shape, (b, s, spec.features)
        if given != (wanted if spec.features else None):
            raise ContractError(f"the chunk's features are {given}, the model takes {wanted}")
        if not 0 < b <= rows:
            raise ContractError(f"chunk of {b} rows on a cache of {rows}")
        if int(self.past_lens.min()) < 0 or int(self.past_lens.max()) + s > capacity:
            raise ContractError(f"chunk of {s} tokens after {self.past_lens.max()} does not fit {capacity} slots")
        if int(self.logit_indices.min()) < 0 or int(self.logit_indices.max()) >= s:
            raise ContractError(f"logit index {self.logit_indices.max()} is outside the chunk of {s}")
        if int(self.position_ids.min()) < 0 or int(self.position_ids.max()) >= spec.max_length:
            raise ContractError(f"position {self.position_ids.max()} is outside the model's {spec.max_length}")
        known = max(spec.logits_size, spec.vocab_size)
        if int(self.input_ids.min()) < 0 or int(self.input_ids.max()) >= known:
            raise ContractError(f"token id {self.input_ids.max()} is outside the model's {known}")

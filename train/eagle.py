"""Training of EAGLE-3's drafter: it learns on the chains that it will draft, not only on the target's states.

Training-time test (Li et al., arXiv:2503.01840): step 0 feeds every pair with the target's states; step k feeds pair t
with what step k - 1 left at t - 1, as the k-th self-fed pair of the chain that began at pair t - k. It sees what it
would see when drafting: the target-fed pairs up to t - k, and the pairs of its own chain. Chains of one length from all
pairs of a text are one pass, and in it a chain's earlier pairs lie on diagonals: `chain_attention`. Tokens are the
text's own, so a chain is what would be drafted as long as it is right; that is all that an acceptance estimate asks.

In training `fc` reads the states divided by their spread, channel by channel. A few channels of a target's layers are
hundreds of times as large as the rest; undivided, what is learned in a short run is less (docs/performance.md).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.utils.parametrize import register_parametrization
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specdec.engines.contract import IntArray
from specdec.export.eagle_files import EMBEDDING, IDS, MEMBERS, write_eagle
from specdec.export.eagle_model import EagleConfig, EagleModel
from specdec.train.batches import Batch
from specdec.train.target import Target, soft_cross_entropy

MICRO_TOKENS = 4096
DEPTH = 4  # drafted tokens that an estimate of τ asks for
DECAY = 0.8  # weight of a step against the one before: later tokens are reached less often
_CHAINS = "specdec_chains"


class Steps(Cache):
    """Keys and values [B, H_kv, S, D] of every step so far, handed out one step behind the other."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_rest: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a step; return keys and values [B, H_kv, (k + 1) * S, D] of all."""
        self._keys.append(key_states)
        self._values.append(value_states)
        return torch.cat(self._keys, 2), torch.cat(self._values, 2)


def chain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of step k, query [B, H, S, D], over the keys and values of steps 0 to k, [B, H_kv, (k + 1) * S, D].

    Position t sees step 0 up to t - k, and of step j > 0 position t - k + j alone. The first k positions have no chain
    and mean nothing. An attention function of transformers: returns [B, S, H, D].
    """
    rows, heads, size, width = query.shape
    groups = key.shape[1]
    behind = key.shape[2] // size - 1  # k
    if not behind:
        plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return plain.transpose(1, 2), None
    asked = query.view(rows, groups, heads // groups, size, width)
    keys, values = (x.view(rows, groups, behind + 1, size, width) for x in (key, value))
    fed = asked @ keys[:, :, :1].mT  # [B, H_kv, H / H_kv, S, S]: the target-fed pairs
    hidden = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1 - behind)
    chain = [(_later(keys[:, :, j], behind - j), _later(values[:, :, j], behind - j)) for j in range(1, behind + 1)]
    scores = [fed.masked_fill(hidden, -torch.inf), *((asked * k.unsqueeze(2)).sum(-1, keepdim=True) for k, _ in chain)]
    weights = (torch.cat(scores, -1) * scaling).softmax(-1)
    mixed = weights[..., :size] @ values[:, :, :1]
    for j, (_, v) in enumerate(chain):
        mixed = mixed + weights[..., size + j : size + j + 1] * v.unsqueeze(2)
    return mixed.view(rows, heads, size, width).transpose(1, 2), None


AttentionInterface.register(_CHAINS, chain_attention)


def _later(x: torch.Tensor, places: int) -> torch.Tensor:
    """Move x [..., S, D] by `places` positions: what was at t is at t + places."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


class Divided(torch.nn.Module):
    """A weight [H, F] for inputs that are divided by `spread` [F], as the weight for those that are not."""

    spread: torch.Tensor

    def __init__(self, spread: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("spread", spread, persistent=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight for undivided inputs."""
        return weight / self.spread

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight for divided ones."""
        return weight * self.spread


class EagleLearner:
    """A drafter of `config` that learns from `target`; `ids` [Vd]: its vocabulary (None: the target's).

    `self_fed`: how many pairs of a chain are fed with its own states in training. `spread` [T * H]: of the states that
    it reads. `state`: tensors by public name that it begins with; without, only the head begins as the target's.
    """

    micro_tokens = MICRO_TOKENS

    def __init__(
        self,
        config: EagleConfig,
        target: Target,
        ids: IntArray | None,
        self_fed: int,
        spread: torch.Tensor,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = EagleModel(config)
        self.model.set_attn_implementation(_CHAINS)
        self._target, self._self_fed, self._taps = target, self_fed, config.tapped_size
        vocab = config.llama.vocab_size
        self._ids = torch.arange(vocab) if ids is None else torch.from_numpy(ids)
        self._reduced = ids is not None
        self._place = torch.full((vocab + 1,), -1)  # [V + 1]: index in the draft vocabulary; last, of no token: -1
        self._place[self._ids] = torch.arange(len(self._ids))
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(target.embedding.weight)
            self.model.lm_head.weight.copy_(target.head[self._ids.to(target.device)])
            self.model.fc.weight.copy_(torch.randn_like(self.model.fc.weight) / config.tapped_size**0.5 / spread)
        begin = {name: tensor for name, tensor in (state or {}).items() if name not in (IDS, MEMBERS)}
        self.model.load_state_dict(begin, strict=False)  # what may be missing is as set above: `read_eagle` has looked
        self._own_embedding = EMBEDDING in begin
        register_parametrization(self.model.fc, "weight", Divided(spread))
        self.model.embed_tokens.requires_grad_(False)
        self.model.to(target.device)
        self._ids, self._place = self._ids.to(target.device), self._place.to(target.device)
        self._head = target.head[self._ids]

    def _steps(self, batch: Batch, steps: int) -> list[torch.Tensor]:
        """The states [B, S - 1, H] that steps 0 to `steps` - 1 leave at every pair."""
        tokens, cache = batch.tokens[:, 1:], Steps()
        left = [self.model.states(tokens, batch.features[:, :-1, : self._taps], cache=cache)]
        while len(left) < steps:
            left.append(self.model.states(tokens, own=_later(left[-1], 1), cache=cache))
        return left

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum over pairs and steps, each step weighted, of the cross-entropy against the target's distribution."""
        following = batch.following
        known = (following < 0) | (self._place[following] >= 0)  # where the text has ended, the target still speaks
        first = batch.pairs(0, 0) & known
        finals = batch.features[:, 1:, self._taps :]
        taught = torch.softmax(self._target.logits(finals[first], self._ids), -1)  # [n, Vd]
        total = torch.zeros((), device=taught.device)
        scale = sum(DECAY**step for step in range(self._self_fed + 1))
        for step, states in enumerate(self._steps(batch, self._self_fed + 1)):
            pairs = first & batch.pairs(step, 0)
            entropy = soft_cross_entropy(self.model.logits(states[pairs]), taught[pairs[first]])
            total = total + entropy.sum() * (DECAY**step / scale)
        return total

    def right(self, batch: Batch) -> torch.Tensor:
        """Whether the k-th token of a chain is the text's [n, DEPTH], for chains from all pairs with so much text."""
        starts = batch.pairs(0, DEPTH)
        found = []
        for step, states in enumerate(self._steps(batch, DEPTH)):
            drafted = self._ids[self.model.logits(states).argmax(-1)] == batch.following
            found.append(drafted.roll(-step, 1)[starts])
        return torch.stack(found, -1)

    def write(self, folder: Path, held_out: Iterable[Batch]) -> None:
        """Write the drafter in EAGLE-3's public format, in float16; its embedding only if it is not the target's."""
        state = {name: value.half() for name, value in self.model.state_dict().items()}
        if not self._own_embedding:
            del state[EMBEDDING]
        if self._reduced:
            ids = self._ids.cpu()
            state[IDS] = ids - torch.arange(len(ids))
            state[MEMBERS] = torch.zeros(len(self._place) - 1, dtype=torch.bool).index_fill(0, ids, True)
        write_eagle(folder, self.model.settings, state)

"""From a drafter's record in the manifest to the drafter: what each kind needs of bundle, options and target.

A kind is a row of `_OPENERS`. This module wires; it knows no algorithm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engines.base import Engine, Heads
from specdec.engines.contract import IntArray, ModelSpec
from specdec.engines.errors import BundleError, RequestError
from specdec.engines.ids import read_ids
from specdec.engines.manifest import (
    BLOCKWISE,
    EagleDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    Model,
    ModelDrafter,
    NgramDrafter,
    Variant,
)
from specdec.engines.manifest import (
    Drafter as Record,
)
from specdec.runtime import drafters
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.controller import Controller
from specdec.runtime.drafters.adaptive import AdaptiveDrafter
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.drafters.eagle import EagleDrafter as Eagle
from specdec.runtime.drafters.fallback import FallbackDrafter
from specdec.runtime.drafters.growth import Shape
from specdec.runtime.drafters.layerskip import LayerSkipDrafter as FirstLayers
from specdec.runtime.drafters.medusa import MedusaDrafter as MedusaHeads
from specdec.runtime.drafters.model import ModelDrafter as DraftModel
from specdec.runtime.drafters.ngram import NgramDrafter as Lookup
from specdec.runtime.kv import BorrowedModel, CachedModel

Maker = Callable[[CachedModel], Drafter]  # the target's cache -> a drafter for its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What drafters are opened with.

    `method`: as the user says it. `variant`: the target's, by the user's choice (None: the first), `precision` its own.
    `most`: nodes of a proposal. `width`: positions of the target's narrowest pass. `open`: a graph's engine and the
    positions of its narrowest pass. `open_heads`: heads. `controller`: of adaptive drafts.
    """

    method: str
    bundle: Path
    spec: ModelSpec
    variant: str | None
    precision: str
    config: SpeculativeConfig
    most: int
    width: int
    open: Callable[[ModelSpec, Variant], tuple[Engine, int]]
    open_heads: Callable[[MedusaDrafter], Heads]
    controller: Controller | None = None

    def shape(self, accuracies: Sequence[Sequence[float]] = ()) -> Shape:
        """The shape of grown trees; `accuracies`: as measured of the draft (`SpeculativeConfig.shape`)."""
        default = drafters.TREE_TOKENS if self.config.branches else drafters.MODEL_TOKENS
        return self.config.shape(min(default, self.most), accuracies)

    @property
    def ranked(self) -> bool:
        """Whether drafts are the most probable tokens."""
        return self.config.draft_sample_method == "greedy" or self.method == BLOCKWISE


def open_drafter(record: Record, opening: Opening, before: Record | None = None) -> Maker:
    """Open what the drafter of `record` runs on; `before`: a drafter that proposes first, where it finds something.

    Raises `BundleError`, `EngineError` or `RequestError`.
    """
    own: Callable[[CachedModel], Any] = _OPENERS[type(record)](record, opening)
    controller = opening.controller
    if controller is not None:
        lookup = record if before is None else before
        free = _lookup(lookup, opening) if isinstance(lookup, NgramDrafter) else None
        costly = None if isinstance(record, NgramDrafter) else own
        most = min(drafters.NGRAM_TOKENS, opening.most)
        return lambda target: AdaptiveDrafter(
            controller, free(target) if free else None, costly(target) if costly else None, most
        )
    if before is None:
        return own
    assert isinstance(before, NgramDrafter), "the drafter that can find nothing"
    first = _lookup(before, opening, sure=True)
    return lambda target: FallbackDrafter(first(target), own(target))


def check_backend(method: str, record: Record | None, backend: str) -> None:
    """Raise `RequestError` for a drafter that the target on `backend` cannot serve."""
    if isinstance(record, LayerSkipDrafter) and backend != "ort":
        raise RequestError(f"drafter {method} shares the target's cache, which only backend ort can")
    if reads_hidden(record) and backend != "ort":
        raise RequestError(f"drafter {method} reads the target's hidden states, which only backend ort hands out")


def reads_hidden(record: Record | None) -> bool:
    """Whether the target has to keep its hidden states for this drafter."""
    return isinstance(record, EagleDrafter | MedusaDrafter)


def own_caches(record: Record | None) -> list[ModelSpec]:
    """Shapes of the models whose cache this drafter needs beside the target's."""
    return [record.model.spec] if isinstance(record, ModelDrafter | EagleDrafter) else []


def pick_variant(model: Model, name: str | None = None) -> Variant:
    """Return the variant of this name, or the first."""
    if not model.variants:
        raise BundleError("the manifest lists a model without variants; export the bundle again")
    if name is not None and name not in model.variants:
        raise RequestError(f"this bundle has no variant {name!r}: choose one of {', '.join(model.variants)}")
    return model.variants[name or next(iter(model.variants))]


def _lookup(record: NgramDrafter, opening: Opening, *, sure: bool = False) -> Callable[[CachedModel], Lookup]:
    """`sure`: only matches that are kept more often than what another drafter would propose."""
    config, threshold = opening.config, opening.config.confidence_threshold
    if config.adaptive:
        threshold = 0.0  # the plan says how far
    elif threshold is None:
        threshold = drafters.NGRAM_THRESHOLDS.get(opening.precision, drafters.NGRAM_THRESHOLD)
    return lambda target: Lookup(
        config.num_speculative_tokens or min(drafters.NGRAM_TOKENS, opening.most),
        max(config.prompt_lookup_min, drafters.SURE_MATCH) if sure else config.prompt_lookup_min,
        max(config.prompt_lookup_max, drafters.SURE_MATCH) if sure else config.prompt_lookup_max,
        threshold=threshold,
        always=opening.width > 1 and not sure,
        branching=config.branches,
    )


def _draft_model(record: ModelDrafter, opening: Opening) -> Maker:
    engine, width = opening.open(record.model.spec, pick_variant(record.model))

    def make(target: CachedModel) -> Drafter:
        model = CachedModel(engine, max_rows=target.max_rows, min_width=width)
        size, shared = opening.spec.vocab_size, record.shared_vocab
        return DraftModel(model, opening.shape(), size, shared, deterministic=opening.ranked)

    return make


def _first_layers(record: LayerSkipDrafter, opening: Opening) -> Maker:
    engine, width = opening.open(record.model.spec, pick_variant(record.model, opening.variant))

    def make(target: CachedModel) -> Drafter:
        model = BorrowedModel(engine, target, min_width=width)
        return FirstLayers(model, opening.shape(), deterministic=opening.ranked)

    return make


def _eagle(record: EagleDrafter, opening: Opening) -> Maker:
    engine, width = opening.open(record.model.spec, pick_variant(record.model, opening.variant))
    ids = _ids(record.ids, record.model.spec.logits_size, opening)

    def make(target: CachedModel) -> Drafter:
        model = CachedModel(engine, max_rows=target.max_rows, min_width=width)
        return Eagle(model, target, opening.shape(), record.taps, ids, deterministic=opening.ranked)

    return make


def _medusa(record: MedusaDrafter, opening: Opening) -> Maker:
    heads = opening.open_heads(record)
    ids = _ids(record.ids, record.spec.logits_size, opening)

    def make(target: CachedModel) -> Drafter:
        shape = opening.shape(record.accuracies)
        return MedusaHeads(target, heads, shape, ids, min_rows=opening.width, deterministic=opening.ranked)

    return make


def _ids(file: str | None, count: int, opening: Opening) -> IntArray | None:
    return None if file is None else read_ids(opening.bundle / file, count, opening.spec.logits_size)


_OPENERS: dict[type, Callable[[Any, Opening], Maker]] = {
    NgramDrafter: _lookup,
    ModelDrafter: _draft_model,
    LayerSkipDrafter: _first_layers,
    MedusaDrafter: _medusa,
    EagleDrafter: _eagle,
}

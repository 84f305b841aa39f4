"""Every kind of drafter on the fake engine, and a controller whose plans do not depend on the clock."""

from collections.abc import Callable

from specdec.runtime.controller import Controller, PassTimes
from specdec.runtime.drafters.adaptive import AdaptiveDrafter
from specdec.runtime.drafters.base import Drafter
from specdec.runtime.drafters.growth import DynamicShape, StaticShape
from specdec.runtime.drafters.layerskip import LayerSkipDrafter
from specdec.runtime.drafters.model import ModelDrafter
from specdec.runtime.drafters.ngram import NgramDrafter
from specdec.runtime.kv import BorrowedModel, CachedModel
from support.fake_engine import FakeEngine, fake_spec
from support.rows import WatchedModel

VOCAB = 8


class SteadyTimes(PassTimes):
    """Times that no pass changes."""

    def observe(self, rows: int, width: int, ms: float) -> None:
        pass


def steady_controller(
    curve: dict[int, float] | None = None, level_ms: float = 0.05, least_width: int = 2
) -> Controller:
    """By default drafting is worth little more than it costs, so plans differ from round to round."""
    controller = Controller(SteadyTimes(curve or {1: 1.0, 2: 1.05, 4: 1.3, 8: 2.4}, 1), least_width)
    controller.levels = SteadyTimes({1: level_ms}, 1)
    return controller


def target(vocab: int = VOCAB, **options: object) -> FakeEngine:
    return FakeEngine(fake_spec(vocab), order=2, min_width=2, **options)


def drafter_of(
    kind: str, *, num_tokens: int = 3, max_rows: int = 4, vocab: int = VOCAB, sharpness: float = 2.0
) -> Drafter | Callable[[CachedModel], Drafter] | None:
    """`kind`: what drafts, and the form of its trees; a draft in the target's cache is made when there is one."""
    if kind.startswith("adaptive"):
        costly = drafter_of(kind.partition(" ")[2], num_tokens=num_tokens, max_rows=max_rows, vocab=vocab,
                            sharpness=sharpness)  # fmt: skip
        free = NgramDrafter(num_tokens, 1, 4, threshold=0.0, always=True)
        make = costly if callable(costly) else lambda target: costly
        return lambda target: AdaptiveDrafter(steady_controller(), free, make(target), num_tokens)
    name, _, form = kind.partition(" ")
    if name == "plain":
        return None
    if name == "ngram":
        return NgramDrafter(num_tokens, 1, 4, threshold=0.15, always=True, branching=form == "tree")
    spec, options = {
        "self": (fake_spec(vocab), {"order": 2}),
        "other": (fake_spec(vocab), {"seed": 7, "order": 1}),
        "narrow": (fake_spec(5 * vocab // 8), {"seed": 7, "order": 1}),  # fewer tokens than the target
        "wide": (fake_spec(vocab, logits_size=vocab + 4), {"seed": 7, "order": 1}),  # logits beyond the vocabulary
        "short": (fake_spec(vocab, max_length=12), {"order": 2}),  # a context that ends before the target's
        "layers": (fake_spec(vocab), {"order": 2}),  # in the target's cache, and as good as the target
        "skip": (fake_spec(vocab), {"seed": 7, "order": None}),  # in the target's cache
    }[name]
    engine = FakeEngine(spec, sharpness=sharpness, **options)
    shape = {
        "": StaticShape.chain(num_tokens),
        "tree": StaticShape([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]),
        "stem": StaticShape([[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1, 0]]),  # forks late
        "top": StaticShape([[0], [1], [0, 0], [0, 1]]),
        "dynamic": DynamicShape(2 * num_tokens),
    }[form]
    ranked = form == "top"
    if name in ("layers", "skip"):
        return lambda target: LayerSkipDrafter(BorrowedModel(engine, target, min_width=2), shape, deterministic=ranked)
    model = WatchedModel(engine, max_rows=max_rows, min_width=2)
    return ModelDrafter(model, shape, vocab, min(vocab, spec.vocab_size), deterministic=ranked)


TREES = ["ngram tree", "self tree", "other tree", "other stem", "narrow tree", "short stem", "other top",
         "self dynamic", "other dynamic", "skip tree", "skip stem", "skip dynamic"]  # fmt: skip
ADAPTIVE = ["adaptive plain", "adaptive self", "adaptive other", "adaptive short", "adaptive skip"]
KINDS = ["plain", "ngram", "self", "other", "narrow", "wide", "short", "layers", "skip", *TREES, *ADAPTIVE]

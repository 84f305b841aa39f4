"""How to speculate: which drafter, how far, in what shape. This module knows names and shapes: no bundle, no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.engines.errors import RequestError
from specdec.engines.manifest import BLOCKWISE, MEDUSA
from specdec.runtime.drafters.growth import DynamicShape, Shape, StaticShape, choose_tree

TREES = ("chain", "dynamic", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate; field names as in vLLM.

    `method`: a drafter of the bundle, `ngram+M` (n-grams, and M where they find nothing), `auto` (its first drafter,
    and n-grams where the bundle has them), or None for plain decoding. Chains are as long as pays, by what passes cost
    and what was kept so far, and there are none where none pays (`controller.py`), unless one of the next two is given.
    `num_speculative_tokens`: most draft tokens (nodes of a tree) a round. `confidence_threshold`: least chance, 0 to 1,
    that a draft's second and later tokens have of being kept with all before them: of an n-gram, as measured; of other
    drafters, by their own distribution, as the confidence below which nothing grows. With one of them only, the other
    is the method's default; trees have defaults of both. `prompt_lookup_min` and `prompt_lookup_max`: tokens that an
    n-gram match has at least, and at most before it is extended.

    `tree`: `chain`, `dynamic` (grown where the draft is confident), `measured` (the best one of so many nodes for the
    accuracies that were measured of Medusa heads), or paths of child ranks as Medusa's `medusa_choices`:
    [[0], [0, 0], [1]]. Trees that branch are lossless in law, not in bits: they run in mode `fast`.
    `draft_sample_method`: `probabilistic` draws a draft model's tokens from its distribution, `greedy` takes the most
    probable ones.
    """

    method: str | None = "auto"
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4
    confidence_threshold: float | None = None
    tree: Literal["chain", "dynamic", "measured"] | Sequence[Sequence[int]] = "chain"
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"

    def __post_init__(self) -> None:
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise RequestError(f"draft_sample_method must be probabilistic or greedy, not {self.draft_sample_method!r}")
        if isinstance(self.tree, str):
            if self.tree not in TREES:
                raise RequestError(f"tree must be {', '.join(TREES)} or a list of paths, not {self.tree!r}")
        else:
            if not _is_paths(self.tree):
                raise RequestError(f"tree must be {', '.join(TREES)} or a list of paths of ranks, not {self.tree!r}")
            StaticShape(self.tree)
            if self.num_speculative_tokens is not None:
                raise RequestError("num_speculative_tokens and a list of paths both size the tree: give one of them")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if not _whole(value) and not (value is None and name == "num_speculative_tokens"):
                raise RequestError(f"{name} must be a whole number, not {value!r}")
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise RequestError(
                f"num_speculative_tokens must be at least 1, not {self.num_speculative_tokens} (method None is plain)"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise RequestError(
                "prompt_lookup_min and prompt_lookup_max must be at least 1 and in order, "
                f"not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )

        threshold = self.confidence_threshold
        if threshold is not None and not (_number(threshold) and 0 <= threshold <= 1):
            raise RequestError(f"confidence_threshold must be a number from 0 to 1, not {threshold!r}")

    def check(self, method: str | None, most: int, *, measured: bool) -> None:
        """Raise `RequestError` for a tree that `method` cannot draft, or of more than `most` nodes.

        `measured`: whether the accuracies of the method's drafts by depth and rank are known.
        """
        nodes = self.num_speculative_tokens if isinstance(self.tree, str) else StaticShape(self.tree).nodes
        if nodes is not None and nodes > most:
            raise RequestError(
                f"num_speculative_tokens {nodes} is more than this bundle's {most} (--max-tree at export)"
            )
        if not isinstance(self.tree, str) and method == "ngram":
            raise RequestError("a list of paths is for drafters that rank their tokens: with ngram use tree='dynamic'")
        if self.tree != "chain" and method == BLOCKWISE:
            raise RequestError(f"{BLOCKWISE} drafts chains: for trees use method {MEDUSA}")
        if self.tree == "measured" and not measured:
            raise RequestError("tree measured is for Medusa heads whose accuracies were measured: use tree='dynamic'")

    @property
    def adaptive(self) -> bool:
        """Whether the controller says each round how far to draft, and with what: nothing here does."""
        return self.tree == "chain" and self.num_speculative_tokens is None and self.confidence_threshold is None

    @property
    def branches(self) -> bool:
        """Whether proposals may be other than chains."""
        return self.tree == "measured" or not self.shape(1).linear

    def shape(self, tokens: int, accuracies: Sequence[Sequence[float]] = ()) -> Shape:
        """The shape of a grown tree; `tokens`: most nodes, where the configuration does not say.

        `accuracies`: of the draft by depth and rank, for the tree `measured`.
        """
        count, sure = self.num_speculative_tokens or tokens, self.confidence_threshold
        floor = {} if sure is None else {"floor": float(sure)}
        if self.tree == "measured":
            return StaticShape(choose_tree(accuracies, count), **floor)
        if self.tree == "chain":
            return StaticShape.chain(count, **floor)
        return DynamicShape(count, **floor) if self.tree == "dynamic" else StaticShape(self.tree, **floor)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_paths(tree: object) -> bool:
    """Whether `tree` is a list of lists of whole numbers, none of them empty."""
    lists = (list, tuple)
    return (
        isinstance(tree, lists)
        and bool(tree)
        and all(isinstance(path, lists) and path and all(map(_whole, path)) for path in tree)
    )

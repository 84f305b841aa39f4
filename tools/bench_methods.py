"""Names of methods to `LLM`s: `plain`, `plain-fast`, and a bundle's drafters with rule, shape and size.

This module knows what a name means and which ones a bundle has; it measures nothing.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engines.errors import RequestError
from specdec.engines.manifest import NGRAM, Manifest
from specdec.engines.registry import EngineConfig
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.drafters.opening import pick_variant
from specdec.runtime.llm import LLM, Mode, Opener
from specdec.runtime.params import SamplingParams
from specdec.tools.figures import FAST, PLAIN

METHOD = "DRAFTER[@RULE][/TREE[/TOKENS[/THRESHOLD]]]"
AUTO = "auto"
_NAME = re.compile(
    r"(?P<drafter>[^@/]+)(@(?P<rule>[^/]+))?(/(?P<tree>[a-z]+)(/(?P<tokens>\d+)(/(?P<threshold>\d+(\.\d+)?))?)?)?"
)


@dataclass(frozen=True, slots=True)
class Method:
    """A method that is loaded: its name, and what answers how. `least_width`: positions of its narrowest pass."""

    name: str
    llm: LLM
    params: SamplingParams
    least_width: int


def read_method(name: str, tokens: int | None) -> tuple[SpeculativeConfig, str]:
    """How a method called `name` speculates, and the rule of acceptance it asks for ("": the default).

    A name is plain, plain-fast or DRAFTER[@RULE][/TREE[/TOKENS[/THRESHOLD]]]. `tokens`: where it says no number. Raises
    `RequestError` when it is no such name.
    """
    if name in (FAST, PLAIN):
        return SpeculativeConfig(method=None), ""
    found = _NAME.fullmatch(name)
    if found is None:
        raise RequestError(f"method {name} is not {METHOD}, as in eagle/dynamic/8 or eagle/chain/3/0.5")
    count, threshold = found["tokens"], found["threshold"]
    tree: Any = found["tree"] or "chain"
    config = SpeculativeConfig(
        method=found["drafter"],
        num_speculative_tokens=int(count) if count else tokens,
        tree=tree,
        confidence_threshold=float(threshold) if threshold else None,
    )
    return config, found["rule"] or ""


def chosen_names(asked: Sequence[str], manifest: Manifest, variant: str | None, engine: EngineConfig) -> list[str]:
    """The names that were asked for, `plain` before them if it is not among them; without any, all of the bundle.

    All: plain decoding (as one-token passes too, where those are other kernels), every drafter, and what `auto` takes.
    """
    if asked:
        return [*([] if PLAIN in asked else [PLAIN]), *asked]
    invariance = pick_variant(manifest.target, variant).invariance
    padded = invariance.exact and engine.is_gated and invariance.least_width > 1
    combined = NGRAM in manifest.drafters and len(manifest.drafters) > 1
    return [*([FAST] if padded else []), PLAIN, *manifest.methods(), *([AUTO] if combined else [])]


def open_methods(
    bundle: Path,
    names: Sequence[str],
    sampling: dict[str, Any],
    *,
    tokens: int | None,
    variant: str | None,
    engine: EngineConfig,
    opener: Opener,
    stack: ExitStack,
) -> list[Method]:
    """Load every method; `stack` closes them. Files are verified once.

    `auto` gets the name of what it takes. No cache of an earlier text is reused: every prompt is computed.
    """
    methods: dict[str, Method] = {}
    for name in names:
        config, rule = read_method(name, tokens)
        mode: Mode | None = "fast" if name == FAST else None
        params = SamplingParams(**sampling | ({"acceptance": rule} if rule else {}))
        llm = LLM(
            bundle,
            speculative=config,
            variant=variant,
            mode=mode,
            engine=engine,
            verify=not methods,
            prefix_bytes=0,
            opener=opener,
        )
        stack.enter_context(llm)
        own = (llm.method or name) if name == AUTO else name
        least = 1 if llm.mode == "fast" else pick_variant(llm.manifest.target, variant).invariance.least_width
        methods.setdefault(own, Method(own, llm, params, least))
    return list(methods.values())

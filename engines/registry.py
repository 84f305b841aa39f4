"""Backend names to engines. A backend's library is imported when its engine is asked for, never before.

This module knows names and how to install what is missing; it knows nothing of any vendor's API.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from specdec.engines.base import Engine, Heads
from specdec.engines.contract import HeadsSpec, ModelSpec
from specdec.engines.errors import EngineUnavailableError, RequestError
from specdec.engines.manifest import Plan, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a graph: the backend, its provider (device), and how many threads (None: one per core).

    Provider and threads are ONNX Runtime's. `plans`: engine files compiled from this graph, for the backends that run
    those (`with_plans` fills it in).
    """

    backend: str = "ort"
    provider: str = "cpu"
    threads: int | None = None
    plans: Mapping[Path, Plan] = field(default_factory=dict)

    @property
    def is_gated(self) -> bool:
        """Whether this is the engine that the gates of an export run on: ONNX Runtime on the CPU."""
        return (self.backend, self.provider) == ("ort", "cpu")

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise RequestError(f"threads must be at least 1, not {self.threads}")


def _check_ort() -> None:
    if importlib.util.find_spec("onnxruntime") is None:
        raise EngineUnavailableError(
            'ONNX Runtime is not installed: pip install "specdec[cpu]" (with an NVIDIA GPU: "specdec[gpu]")'
        )


def _open_ort(graph: Path, spec: ModelSpec, config: EngineConfig) -> Engine:
    _check_ort()
    from specdec.engines.ort import OrtEngine

    return OrtEngine(graph, spec, provider=config.provider, threads=config.threads)


def _open_plan(backend: str, graph: Path, spec: ModelSpec, config: EngineConfig) -> Engine:
    plans = {path: plan for path, plan in config.plans.items() if plan.backend == backend}
    if not plans:
        raise EngineUnavailableError(
            f"{graph.parent} holds no {backend} plan: export with --backend {backend}, or use backend ort"
        )
    from specdec.engines.trt import open_plan

    return open_plan(plans, spec, backend)


_FACTORIES: dict[str, Callable[[Path, ModelSpec, EngineConfig], Engine]] = {
    "ort": _open_ort,
    "tensorrt": partial(_open_plan, "tensorrt"),
    "tensorrt-rtx": partial(_open_plan, "tensorrt-rtx"),
}


def backends() -> tuple[str, ...]:
    """Names that `open_engine` takes."""
    return tuple(_FACTORIES)


def with_plans(config: EngineConfig, bundle: Path, variant: Variant) -> EngineConfig:
    """`config` with the plans of `variant`, a variant of the bundle in the folder `bundle`."""
    return replace(config, plans={bundle / plan.file: plan for plan in variant.plans.values()})


def open_engine(graph: Path, spec: ModelSpec, config: EngineConfig | None = None) -> Engine:
    """Load `graph` (an ONNX file that keeps the contract for `spec`), or a plan of it, on the backend of `config`.

    Raises `EngineUnavailableError` when the backend, its library, its provider, its GPU or a plan for that GPU is not
    here, `EngineError` when the graph does not load, `ContractError` when its ends are not the contract's.
    """
    config = config or EngineConfig()
    factory = _FACTORIES.get(config.backend)
    if factory is None:
        raise EngineUnavailableError(f"unknown backend {config.backend!r}: choose one of {', '.join(_FACTORIES)}")
    return factory(graph, spec, config)


def open_heads(graph: Path, spec: HeadsSpec, config: EngineConfig | None = None) -> Heads:
    """Load Medusa heads, whose graph takes the hidden states that backend ort alone hands out.

    Raises as `open_engine`.
    """
    config = config or EngineConfig()
    if config.backend != "ort":
        raise EngineUnavailableError(f"Medusa heads read hidden states, which {config.backend} has none of: use ort")
    _check_ort()
    from specdec.engines.ort_heads import OrtHeads

    return OrtHeads(graph, spec, provider=config.provider, threads=config.threads)

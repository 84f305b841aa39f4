"""Backend names to engines. A backend's library is imported when its engine is asked for, never before.

This module knows names and how to install what is missing; it knows nothing of any vendor's API.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdec.engines.base import Engine
from specdec.engines.contract import ModelSpec
from specdec.engines.errors import EngineUnavailableError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a graph: the backend, its provider (device), and how many threads (None: one per core)."""

    backend: str = "ort"
    provider: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise RequestError(f"threads must be at least 1, not {self.threads}")


def _open_ort(graph: Path, spec: ModelSpec, config: EngineConfig) -> Engine:
    if importlib.util.find_spec("onnxruntime") is None:
        raise EngineUnavailableError(
            'ONNX Runtime is not installed: pip install "specdec[cpu]" (with an NVIDIA GPU: "specdec[gpu]")'
        )
    from specdec.engines.ort import OrtEngine

    return OrtEngine(graph, spec, provider=config.provider, threads=config.threads)


_FACTORIES: dict[str, Callable[[Path, ModelSpec, EngineConfig], Engine]] = {"ort": _open_ort}


def backends() -> tuple[str, ...]:
    """Names that `open_engine` takes."""
    return tuple(_FACTORIES)


def open_engine(graph: Path, spec: ModelSpec, config: EngineConfig | None = None) -> Engine:
    """Load `graph` (an ONNX file that keeps the contract for `spec`) on the backend that `config` names.

    Raises `EngineUnavailableError` when the backend, its library or its provider is not here, `EngineError` when the
    graph does not load, `ContractError` when its inputs and outputs are not the contract's.
    """
    config = config or EngineConfig()
    factory = _FACTORIES.get(config.backend)
    if factory is None:
        raise EngineUnavailableError(f"unknown backend {config.backend!r}: choose one of {', '.join(_FACTORIES)}")
    return factory(graph, spec, config)

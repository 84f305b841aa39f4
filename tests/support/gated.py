"""An engine whose passes a test lets through one by one: what happens between two of them is then certain."""

import threading
from collections.abc import Callable
from pathlib import Path

from specdec.engines.base import Engine, KVBuffers
from specdec.engines.contract import Chunk, FloatArray
from specdec.engines.registry import open_engine
from specdec.runtime import LLM, SpeculativeConfig

SECONDS = 200  # a pass that has not come by then never will; below the limit of a test


class Gate:
    """Where passes wait. Open until `close`."""

    def __init__(self) -> None:
        self.fault: Callable[[Chunk], None] | None = None  # called before every pass, and may raise
        self._closed = False
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def close(self) -> None:
        """Hold all passes from the next one on."""
        self._closed = True

    def arrive(self) -> None:
        """Wait until a pass stands before the gate."""
        assert self._arrived.acquire(timeout=SECONDS), "no pass came"

    def let(self, passes: int) -> None:
        """Let the pass before the gate through, and those behind it; return when another one stands there."""
        for _ in range(passes):
            self._permits.release()
            self.arrive()

    def open(self) -> None:
        """Let the pass before the gate through, and all that follow."""
        self._closed = False
        self._permits.release()

    def wait(self, chunk: Chunk) -> None:
        """What the engine thread does before a pass."""
        if self._closed:
            self._arrived.release()
            assert self._permits.acquire(timeout=SECONDS), "the test never let this pass through"
        if self.fault is not None:
            self.fault(chunk)


class GatedEngine:
    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self.spec, self.capabilities = engine.spec, engine.capabilities
        self.allocate, self.close = engine.allocate, engine.close

    def step(self, chunk: Chunk, kv: KVBuffers, first_row: int = 0) -> FloatArray:
        self._gate.wait(chunk)
        return self._engine.step(chunk, kv, first_row)


def gated_llm(bundle: Path, gate: Gate, method: str | None = None) -> LLM:
    """A bundle whose every pass goes through `gate`."""
    return LLM(
        bundle,
        speculative=SpeculativeConfig(method=method),
        verify=False,
        opener=lambda *arguments: GatedEngine(open_engine(*arguments), gate),
    )

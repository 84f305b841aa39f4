"""The runtime: drafting, verification and emission, on NumPy and one engine library."""

from specdec.engines.registry import EngineConfig
from specdec.runtime.async_llm import AsyncLLM
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.delivery import Delta, Stream
from specdec.runtime.grammar import StructuredOutputsParams
from specdec.runtime.llm import LLM
from specdec.runtime.metrics import Metrics
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import RequestOutput, Stats
from specdec.runtime.sampling import Logprob

__all__ = [
    "LLM",
    "AsyncLLM",
    "Delta",
    "EngineConfig",
    "Logprob",
    "Metrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "Stats",
    "Stream",
    "StructuredOutputsParams",
]

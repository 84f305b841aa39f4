"""The runtime: drafting, verification and emission, on NumPy and one engine library."""

from specdec.engines.registry import EngineConfig
from specdec.runtime.llm import LLM, Delta, SpeculativeConfig
from specdec.runtime.request import RequestOutput, Stats
from specdec.runtime.sampling import Logprob, SamplingParams

__all__ = [
    "LLM",
    "Delta",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "Stats",
]

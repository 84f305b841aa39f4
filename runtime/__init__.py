"""The runtime: drafting, verification and emission, on NumPy and one engine library."""

from specdec.engines.registry import EngineConfig
from specdec.runtime.config import SpeculativeConfig
from specdec.runtime.grammar import StructuredOutputsParams
from specdec.runtime.llm import LLM, Delta
from specdec.runtime.params import SamplingParams
from specdec.runtime.request import RequestOutput, Stats
from specdec.runtime.sampling import Logprob

__all__ = [
    "LLM",
    "Delta",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "Stats",
    "StructuredOutputsParams",
]

"""The parts of OpenVINO and OpenVINO GenAI that the driver uses, over `fake_peers.FakeModel`."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.fake_peers import VERSIONS, FakeModel

__version__ = VERSIONS["openvino"]
StreamingStatus = SimpleNamespace(RUNNING="running")
MODEL = "openvino_model.xml"


@dataclass
class Tensor:
    data: np.ndarray


@dataclass
class TokenizedInputs:
    input_ids: Tensor
    attention_mask: Tensor


class StreamerBase:
    """Raises where a subclass does not call this."""

    def __init__(self) -> None:
        self.ready = True


def GenerationConfig(*, max_new_tokens: int, ignore_eos: bool, do_sample: bool, **options: int) -> SimpleNamespace:  # noqa: N802
    assert (ignore_eos, do_sample) == (True, False)
    assert set(options) <= {"num_assistant_tokens", "max_ngram_size"}
    return SimpleNamespace(max_new_tokens=max_new_tokens, wide="num_assistant_tokens" in options)


def draft_model(path: str, device: str, *, INFERENCE_NUM_THREADS: int) -> FakeModel:  # noqa: N803
    return FakeModel.load(Path(path) / MODEL, INFERENCE_NUM_THREADS)


class LLMPipeline:
    """Tells its streamer a number where one token is new, a list where more are."""

    def __init__(self, path: str, device: str, **options: Any) -> None:
        draft, looked_up = options.pop("draft_model", None), options.pop("prompt_lookup", False)
        threads = options.pop("INFERENCE_NUM_THREADS")
        assert options in ({}, {"ATTENTION_BACKEND": "SDPA"})
        self.fake, self.drafts = FakeModel.load(Path(path) / MODEL, threads), looked_up or draft is not None

    def generate(self, inputs: TokenizedInputs, config: SimpleNamespace, streamer: StreamerBase) -> SimpleNamespace:
        assert streamer.ready
        assert self.drafts == config.wide
        assert inputs.attention_mask.data.all()
        ([*prompt], found) = inputs.input_ids.data.tolist()[0], []
        while len(found) < config.max_new_tokens:
            count = min(2 if config.wide and found else 1, config.max_new_tokens - len(found))
            new = self.fake.greedy([*prompt, *found], count)
            found += new
            assert streamer.write(new if len(new) > 1 else new[0]) == "running"
        streamer.end()
        return SimpleNamespace(tokens=[found])


class Core:
    """Its model is its own request; it takes no beams."""

    model_inputs = tuple(SimpleNamespace(names={name}) for name in ("input_ids", "attention_mask", "position_ids"))

    def compile_model(self, path: str, device: str, config: dict[str, int]) -> "Core":
        self.fake = FakeModel.load(Path(path), config["INFERENCE_NUM_THREADS"])
        return self

    def create_infer_request(self) -> "Core":
        return self

    def reset_state(self) -> None:
        self.past: list[int] = []

    def infer(self, inputs: dict[str, np.ndarray]) -> None:
        assert set(inputs) == {"input_ids", "attention_mask", "position_ids"}
        assert inputs["position_ids"].tolist() == [list(range(inputs["input_ids"].shape[1]))]
        self.logits = self.fake.forward(self.past, inputs["input_ids"][0].tolist())
        self.past += inputs["input_ids"][0].tolist()

    def get_tensor(self, name: str) -> Tensor:
        assert name == "logits"
        return Tensor(self.logits[None])

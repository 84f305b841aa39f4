"""The parts of torch and transformers that the driver uses, over `fake_peers.FakeModel`; a tensor is an array."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from support.fake_peers import VERSIONS, FakeModel

__version__ = VERSIONS["transformers"]
float32 = "float32"
threads: list[int] = []


class Tensor(np.ndarray):
    def numel(self) -> int:
        return self.size

    def numpy(self) -> np.ndarray:
        return np.asarray(self)


def tensor(values: object) -> Tensor:
    return np.asarray(values).view(Tensor)


ones_like = np.ones_like
set_num_threads = threads.append
inference_mode = nullcontext


def GenerationConfig(*, pad_token_id: int) -> SimpleNamespace:  # noqa: N802 - a class there
    return SimpleNamespace(pad_token_id=pad_token_id, eos_token_id=None)


class AutoModelForCausalLM:
    def __init__(self, fake: FakeModel) -> None:
        self.fake, self.generation_config = fake, SimpleNamespace(eos_token_id=0)

    @classmethod
    def from_pretrained(cls, path: str, *, dtype: str) -> "AutoModelForCausalLM":
        assert dtype == float32
        return cls(FakeModel.load(Path(path) / "model.safetensors", threads[-1]))

    def eval(self) -> "AutoModelForCausalLM":
        return self

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.fake.forward([], tokens[0].tolist())[None].view(Tensor))

    def generate(self, tokens, *, attention_mask, do_sample, max_new_tokens, streamer, assistant_model=None,
                 prompt_lookup_num_tokens=0):  # fmt: skip
        """Makes one token a pass; where it speculates two, with an assistant from the prompt's pass on."""
        assert self.generation_config.eos_token_id is None
        assert (attention_mask.shape, do_sample) == (tokens.shape, False)
        assert assistant_model is None or assistant_model.generation_config.eos_token_id is None
        prompt, found = tokens[0].tolist(), []
        streamer.put(tokens)
        while len(found) < max_new_tokens:
            wide = assistant_model is not None or (prompt_lookup_num_tokens and found)
            new = self.fake.greedy([*prompt, *found], min(2 if wide else 1, max_new_tokens - len(found)))
            found += new
            streamer.put(tensor(new))
        streamer.end()
        return tensor([[*prompt, *found]])

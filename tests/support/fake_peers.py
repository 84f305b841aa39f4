"""Stand-ins for peers: a Python that has all of them, and models for them.

The modules `fake_...` beside this one play the libraries, so what is tested runs the drivers' own source. All run one
model whose logits are a formula of the tokens so far; in the peer's process, the clock shows how many passes it has
made.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

END = 0  # the end token
VERSIONS = {"transformers": "7.7", "ort-genai": "9.9", "llama-cpp": "8.8", "openvino": "6.6"}
SCRIPT = """#!{python}
import sys
sys.path.insert(0, {tests!r})
from support.fake_peers import play
option, source, *sys.argv[1:] = sys.argv[1:]
assert option == "-c"
play()
exec(compile(source, "driver", "exec"))
"""


def logits_after(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """Logits [vocab] of the token after `tokens`."""
    return np.sin(np.arange(vocab) * (1 + sum(tokens)) + len(tokens)).astype(np.float32)


def greedy(tokens: Sequence[int], vocab: int, count: int) -> tuple[int, ...]:
    """The most probable `count` tokens after `tokens`, end tokens among them."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(logits_after(found, vocab).argmax()))
    return tuple(found[len(tokens) :])


@dataclass
class FakeModel:
    """The model of a file; wants to run on as many threads as the file says."""

    vocab: int
    threads: int
    passes: ClassVar[int] = 0  # of all models of the process

    @classmethod
    def load(cls, path: Path, threads: int) -> "FakeModel":
        model = cls(**json.loads(path.read_text()))
        assert threads == model.threads, threads
        time.perf_counter = lambda: float(cls.passes)
        print("a library says hello", flush=True)
        return model

    def forward(self, past: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """One pass: logits after each of `tokens` [len(tokens), vocab]."""
        FakeModel.passes += 1
        if not all(0 <= token < self.vocab for token in tokens):
            print("first line", file=sys.stderr)
            raise ValueError("no such token")
        history = [*past, *tokens]
        return np.stack([logits_after(history[:end], self.vocab) for end in range(len(past) + 1, len(history) + 1)])

    def greedy(self, past: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after `past`, in one pass; raises as `forward` does."""
        self.forward([], past)
        return list(greedy(past, self.vocab, count))


def play() -> None:
    """Put the stand-ins where the libraries would be found."""
    from support import fake_llama_cpp, fake_onnxruntime_genai, fake_openvino, fake_transformers

    sys.modules |= {"onnxruntime_genai": fake_onnxruntime_genai, "llama_cpp": fake_llama_cpp}
    sys.modules |= {"llama_cpp.llama_speculative": fake_llama_cpp}
    sys.modules |= {"openvino": fake_openvino, "openvino_genai": fake_openvino}
    sys.modules |= {"torch": fake_transformers, "transformers": fake_transformers}


def peer_python(folder: Path) -> str:
    """Write the Python that has the libraries to `folder`; return its path."""
    path = folder / "python"
    path.write_text(SCRIPT.format(python=sys.executable, tests=str(Path(__file__).parents[1])))
    path.chmod(0o755)
    return str(path)


def genai_folder(folder: Path, vocab: int = 11, threads: int = 1) -> Path:
    """Write a model folder of onnxruntime-genai."""
    model = folder / f"genai-{vocab}"
    model.mkdir()
    (model / "model.onnx").write_text(json.dumps({"vocab": vocab, "threads": threads}))
    (model / "model.onnx.data").write_bytes(bytes(1000))
    (model / "tokenizer.json").write_bytes(bytes(500))
    return model


def checkpoint_folder(folder: Path, vocab: int = 11, threads: int = 1) -> Path:
    """Write a Hugging Face folder."""
    model = folder / f"checkpoint-{vocab}"
    model.mkdir()
    (model / "model.safetensors").write_text(json.dumps({"vocab": vocab, "threads": threads}))
    (model / "tokenizer.json").write_bytes(bytes(500))
    return model


def openvino_folder(folder: Path, vocab: int = 11, threads: int = 1) -> Path:
    """Write a model folder of OpenVINO."""
    model = folder / f"openvino-{vocab}"
    model.mkdir()
    (model / "openvino_model.xml").write_text(json.dumps({"vocab": vocab, "threads": threads}))
    (model / "openvino_model.bin").write_bytes(bytes(1000))
    (model / "openvino_tokenizer.bin").write_bytes(bytes(500))
    return model


def gguf_file(folder: Path, vocab: int = 11, threads: int = 1) -> Path:
    """Write a .gguf file."""
    model = folder / f"model-{vocab}.gguf"
    model.write_text(json.dumps({"vocab": vocab, "threads": threads}))
    return model

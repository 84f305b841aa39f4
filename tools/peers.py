"""Other runtimes to compare with, each in a process and Python of its own: onnxruntime-genai and llama.cpp.

Token ids go in and come out as JSON lines, so all sides decode the same prompt for the same number of tokens and take
turns on an otherwise idle machine. Nothing of a peer is imported here. What a peer's model is, in which precision, and
whether it is the same model as ours, is not known here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from specdec.engines.errors import EngineError, EngineUnavailableError
from specdec.tools.figures import GENAI, LLAMA


@dataclass(frozen=True, slots=True)
class Driver:
    """How to drive one peer: `source` runs in its Python with a model and a number of threads as arguments.

    It defines `version`, `generate` and `score`, and `LOOP` follows it. `generate` makes exactly `count` greedy tokens
    after a prompt, end tokens or not, and returns them and their seconds: the first one comes from the prompt's pass,
    so the clock starts after it: n tokens, n - 1 timed passes. `score` returns the logits after every token, [L, V].
    """

    name: str
    title: str
    source: str


LOOP = """
print(json.dumps({"version": version}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "path" in request:
        logits = numpy.asarray(score(request["tokens"]), numpy.float32)
        numpy.save(request["path"], logits)
        answer = {"shape": logits.shape}
    else:
        tokens, seconds = generate(request["tokens"], request["count"])
        answer = {"token_ids": tokens, "seconds": seconds}
    print(json.dumps(answer), flush=True)
"""

# `min_length` leaves only the last token free to be an end token.
ORT_GENAI = Driver(GENAI, "onnxruntime-genai", """
import json, sys, time
import numpy, onnxruntime_genai as genai

config = genai.Config(sys.argv[1])
options = {"intra_op_num_threads": int(sys.argv[2])}
config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
model = genai.Model(config)

def after(tokens, count):
    params = genai.GeneratorParams(model)
    end = len(tokens) + count
    params.set_search_options(do_sample=False, min_length=end - 1, max_length=end)
    generator = genai.Generator(model, params)
    generator.append_tokens(numpy.array([tokens], numpy.int32))
    return generator

def generate(prompt, count):
    generator = after(prompt, count)
    generator.generate_next_token()
    started = time.perf_counter()
    for _ in range(count - 1):
        generator.generate_next_token()
    seconds = time.perf_counter() - started
    return [int(token) for token in generator.get_sequence(0)[len(prompt):]], seconds

def score(tokens):
    generator = after(tokens, 1)
    return numpy.array(generator.get_output("logits"))[0]

version = genai.__version__
""")  # fmt: skip

# An end token is a token like any other. `llama_decode` and numpy's argmax take less time than `Llama.generate`,
# `Llama.eval` and the library's greedy sampler (0.2 of 13 ms a token with SmolLM2-135M in Q8_0); flash attention, which
# `Llama` leaves off, takes more.
LLAMA_CPP = Driver(LLAMA, "llama.cpp", """
import json, sys, time
import llama_cpp, numpy

held = (None, False)

def loaded(size, scoring):
    global held
    llm, scores = held
    if llm is None or scores != scoring or llm.n_ctx() < size:
        if llm is not None:
            llm.close()
        threads, size = int(sys.argv[2]), -(-size // 256) * 256
        llm = llama_cpp.Llama(sys.argv[1], n_ctx=size, n_threads=threads, n_threads_batch=threads, logits_all=scoring,
                              verbose=False)
        held = (llm, scoring)
    llm.reset()
    return llm

def generate(prompt, count):
    llm = loaded(len(prompt) + count, False)
    llm.eval(prompt)
    last = (llama_cpp.llama_token * 1)()
    batch = llama_cpp.llama_batch_get_one(last, 1)
    shape = (llm.n_vocab(),)

    def best():
        return int(numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape).argmax())

    tokens = [best()]
    started = time.perf_counter()
    for _ in range(count - 1):
        last[0] = tokens[-1]
        if llama_cpp.llama_decode(llm.ctx, batch):
            raise RuntimeError("llama_decode failed")
        tokens.append(best())
    return tokens, time.perf_counter() - started

def score(tokens):
    llm = loaded(len(tokens), True)
    llm.eval(tokens)
    return llm.scores[:len(tokens)]

loaded(1, False)
version = llama_cpp.__version__
""")  # fmt: skip


class Answer(msgspec.Struct, frozen=True):
    """Tokens of one answer; `seconds` is the time of all but the first of them."""

    token_ids: tuple[int, ...]
    seconds: float


class _Hello(msgspec.Struct, frozen=True):
    version: str


class _Scored(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]


class Peer:
    """A model of a peer's own format, loaded in a process of the Python `python` that has the peer's package.

    Raises `EngineUnavailableError` when that Python cannot be started or has no such package, `EngineError` when the
    process fails.
    """

    def __init__(self, driver: Driver, python: str, model: Path, threads: int) -> None:
        self.driver, self.model = driver, model
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [python, "-c", driver.source + LOOP, str(model), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as exc:
            self._errors.close()
            raise EngineUnavailableError(f"{python} cannot be started: {exc.strerror}") from exc
        try:
            self.version = msgspec.json.decode(self._read(), type=_Hello).version
        except EngineError as exc:
            self.close()
            if "ModuleNotFoundError" in str(exc):
                raise EngineUnavailableError(f"{exc}; give a Python that has it: --{driver.name}-python") from exc
            raise
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the model: of the file, or of the graphs and weights in the folder."""
        files = [self.model] if self.model.is_file() else self.model.glob("*.onnx*")
        return sum(path.stat().st_size for path in files)

    def generate(self, prompt: Sequence[int], count: int) -> Answer:
        """Generate exactly `count` tokens after `prompt`, greedily."""
        return msgspec.json.decode(self._ask({"tokens": list(prompt), "count": count}), type=Answer)

    def score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits after each of `tokens`, [L, V]; V is the peer's, which may be padded."""
        with tempfile.TemporaryDirectory(prefix="specdec-peer-") as folder:
            path = Path(folder) / "logits.npy"
            shape = msgspec.json.decode(self._ask({"tokens": list(tokens), "path": str(path)}), type=_Scored).shape
            if len(shape) != 2 or shape[0] != len(tokens):
                raise EngineError(f"{self.driver.title} gives logits of shape {shape} for {len(tokens)} tokens: this "
                                  "version of it cannot be scored")  # fmt: skip
            logits: npt.NDArray[np.float32] = np.load(path)
        return logits

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ask(self, request: dict[str, object]) -> bytes:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise EngineError(self._failure()) from exc
        return self._read()

    def _read(self) -> bytes:
        """Return the next line of JSON; what a library prints between them is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                return line
        raise EngineError(self._failure())

    def _failure(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {self._process.returncode}"
        return f"{self.driver.title} has ended: {reason}"


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_peers` reads: a model for each peer, and the Python that has the peer."""
    add = parser.add_argument
    add("--ort-genai", metavar="FOLDER", type=Path, help="compare with this model of onnxruntime-genai's builder")
    add("--llama-cpp", metavar="FILE", type=Path, help="compare with llama.cpp on this .gguf file")
    for driver, package in ((ORT_GENAI, "onnxruntime-genai"), (LLAMA_CPP, "llama-cpp-python")):
        add(f"--{driver.name}-python", metavar="PYTHON", default=sys.executable, help=f"Python that has {package} "
            "(default: this one)")  # fmt: skip


def open_peers(args: argparse.Namespace, threads: int, stack: ExitStack) -> list[Peer]:
    """Start the peers that were asked for; `stack` ends them."""
    asked = ((ORT_GENAI, args.ort_genai_python, args.ort_genai), (LLAMA_CPP, args.llama_cpp_python, args.llama_cpp))
    return [
        stack.enter_context(closing(Peer(driver, python, model, threads))) for driver, python, model in asked if model
    ]

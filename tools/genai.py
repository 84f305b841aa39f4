"""onnxruntime-genai as a peer to compare with: plain greedy decoding in a process and virtual environment of its own.

Token ids go in and come out as JSON lines, so both sides decode the same prompt for the same number of tokens and take
turns on an otherwise idle machine. Nothing of the peer is imported here.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specdec.engines.errors import EngineError, EngineUnavailableError

# The first token comes from the prompt's pass, so the clock starts after it: n tokens, n - 1 timed passes. `min_length`
# leaves only the last token free to be an end token, so that the number of tokens is the one that was asked for.
DRIVER = """
import json, sys, time
import numpy, onnxruntime_genai as genai
config = genai.Config(sys.argv[1])
options = {"intra_op_num_threads": int(sys.argv[2])}
config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
model = genai.Model(config)
print(json.dumps({"version": genai.__version__}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    prompt, count = request["prompt"], request["count"]
    params = genai.GeneratorParams(model)
    end = len(prompt) + count
    params.set_search_options(do_sample=False, min_length=end - 1, max_length=end)
    generator = genai.Generator(model, params)
    generator.append_tokens(numpy.array([prompt], numpy.int32))
    generator.generate_next_token()
    started = time.perf_counter()
    for _ in range(count - 1):
        generator.generate_next_token()
    seconds = time.perf_counter() - started
    tokens = [int(token) for token in generator.get_sequence(0)[len(prompt):]]
    print(json.dumps({"token_ids": tokens, "seconds": seconds}), flush=True)
"""


class Answer(msgspec.Struct, frozen=True):
    """Tokens of one answer; `seconds` is the time of all but the first of them."""

    token_ids: tuple[int, ...]
    seconds: float


class _Hello(msgspec.Struct, frozen=True):
    version: str


class Genai:
    """A model folder made by onnxruntime-genai's builder, loaded in a process of the Python that has the package.

    Raises `EngineUnavailableError` when that Python cannot be started, `EngineError` when the process fails.
    """

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [python, "-c", DRIVER, str(folder), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as exc:
            self._errors.close()
            raise EngineUnavailableError(f"{python} cannot be started: {exc.strerror}") from exc
        try:
            self.version = msgspec.json.decode(self._read(), type=_Hello).version
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Sequence[int], count: int) -> Answer:
        """Generate exactly `count` tokens after `prompt`, greedily."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": list(prompt), "count": count}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise EngineError(self._failure()) from exc
        return msgspec.json.decode(self._read(), type=Answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

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
        return f"onnxruntime-genai has ended: {reason}"

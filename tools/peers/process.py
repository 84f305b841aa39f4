"""A peer's process: token ids go in and come out as JSON lines, so all sides decode the same prompt for as many tokens.

What a peer's model is, in which precision, and whether it is the same model as ours, is not known here.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from threading import Timer

import msgspec
import numpy as np
import numpy.typing as npt

from specdec.engines.errors import EngineError, EngineUnavailableError
from specdec.tools.peers.driver import LOOP, PLAIN, Driver

SECONDS = 1800.0  # for loading a model, and for one answer


class Answer(msgspec.Struct, frozen=True):
    """Tokens of one answer; `seconds` is the time of all but the `first` of them, which the prompt's pass gave."""

    token_ids: tuple[int, ...]
    seconds: float
    first: int = 1

    @property
    def decoded(self) -> int:
        """Tokens that `seconds` is the time of."""
        return len(self.token_ids) - self.first


class _Hello(msgspec.Struct, frozen=True):
    version: str


class _Scored(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]


class _Process:
    """The process itself: requests and answers, one line each. Raises as `Peer` does."""

    def __init__(self, title: str, command: Sequence[str], seconds: float, hint: str) -> None:
        self.title, self._command, self._seconds, self._hint = title, command, seconds, hint
        self.start()

    def start(self) -> None:
        self._late = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as exc:
            self._errors.close()
            raise EngineUnavailableError(f"{self._command[0]} cannot be started: {exc.strerror}") from exc
        try:
            with self._watched():
                self.version = msgspec.json.decode(self._read(), type=_Hello).version
        except EngineError as exc:
            self.close()
            if "ModuleNotFoundError" in str(exc):
                raise EngineUnavailableError(f"{exc}; {self._hint}") from exc
            raise
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, object]) -> bytes:
        assert self._process.stdin is not None
        with self._watched():
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except OSError as exc:
                raise EngineError(self._failure()) from exc
            return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Kill the process when it takes too long."""

        def kill() -> None:
            self._late = True
            self._process.kill()

        timer = Timer(self._seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _read(self) -> bytes:
        """Return the next line of JSON; what a library prints between them is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                return line
        raise EngineError(self._failure())

    def _failure(self) -> str:
        if self._late:
            return f"{self.title} gave no answer within {self._seconds:g} s and was ended"
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {self._process.returncode}"
        return f"{self.title} has ended: {reason}"


class Peer:
    """A model of a peer's own format, loaded in a process of the Python `python` that has the peer's package.

    It decodes plainly; `in_mode` gives it another mode, in the same process. Raises `EngineUnavailableError` when that
    Python cannot be started or has no such package, `EngineError` when the process fails, or gives no answer within
    `seconds`.
    """

    def __init__(
        self,
        driver: Driver,
        python: str,
        model: Path,
        threads: int,
        draft: Path | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self.driver, self.model, self.name, self.mode = driver, model, driver.name, PLAIN
        command = [python, "-c", driver.source + LOOP, str(model), str(threads), str(draft or "")]
        hint = f"give a Python that has it, {python} does not"
        self._process = _Process(driver.title, command, seconds, hint)

    def in_mode(self, mode: str) -> "Peer":
        """The same process in another of the driver's modes, under a name of its own (`PEER:MODE`)."""
        peer = copy(self)
        peer.mode, peer.name = mode, f"{self.driver.name}:{mode}"
        return peer

    @property
    def version(self) -> str:
        """What the peer's package calls itself."""
        return self._process.version

    @property
    def size(self) -> int:
        """Bytes of the model: of the file, or of the graphs and weights in the folder."""
        files = [self.model]
        if self.model.is_dir():
            files = [path for of in ("*.onnx*", "openvino_model.*", "*.safetensors") for path in self.model.glob(of)]
        return sum(path.stat().st_size for path in files)

    def generate(self, prompt: Sequence[int], count: int) -> Answer:
        """Generate exactly `count` tokens after `prompt`, greedily."""
        request = {"tokens": list(prompt), "count": count, "mode": self.driver.all_modes[self.mode]}
        answer = msgspec.json.decode(self._process.ask(request), type=Answer)
        if len(answer.token_ids) != count:
            raise EngineError(f"{self.driver.title} made {len(answer.token_ids)} tokens where {count} were asked for")
        return answer

    def score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Return the logits after each of `tokens`, [L, V]; V is the peer's, which may be padded. None: not given."""
        with tempfile.TemporaryDirectory(prefix="specdec-peer-") as folder:
            path = Path(folder) / "logits.npy"
            answer = self._process.ask({"tokens": list(tokens), "path": str(path)})
            shape = msgspec.json.decode(answer, type=_Scored).shape
            if not shape:
                return None
            if len(shape) != 2 or shape[0] != len(tokens):
                raise EngineError(f"{self.driver.title} gives logits of shape {shape} for {len(tokens)} tokens: this "
                                  "version of it cannot be scored")  # fmt: skip
            logits: npt.NDArray[np.float32] = np.load(path)
        return logits

    def restart(self) -> None:
        """End the process and start another one, for all modes. Raises as the class does."""
        self._process.close()
        self._process.start()

    def close(self) -> None:
        """End the process."""
        self._process.close()

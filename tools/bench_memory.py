"""How much memory a method needs: the peak of a process of its own that loads it and answers one prompt.

`python -m specdec.tools.bench_memory` reads a `Task` from standard input and prints a number of bytes. In one process
methods would share libraries, weights and each other's peaks. This module knows Linux: elsewhere nothing is told.
"""

import re
import subprocess
import sys
from pathlib import Path

import msgspec

from specdec.engines.registry import EngineConfig
from specdec.runtime.llm import LLM, Mode
from specdec.runtime.params import SamplingParams
from specdec.tools.bench_methods import read_method
from specdec.tools.figures import FAST

STATUS = Path("/proc/self/status")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the process does: answer `prompt` with `method`, up to `count` tokens."""

    bundle: str
    method: str
    tokens: int | None
    variant: str | None
    backend: str
    provider: str
    threads: int
    prompt: tuple[int, ...]
    count: int


def peak_memory(task: Task) -> int | None:
    """Bytes of main memory at the peak (resident, libraries and mapped weights included); None if it cannot be told."""
    if not STATUS.exists():
        return None
    done = subprocess.run(
        [sys.executable, "-P", "-m", "specdec.tools.bench_memory"],
        input=msgspec.json.encode(task),
        capture_output=True,
        check=False,
    )
    last = done.stdout.strip().rpartition(b"\n")[2]
    return int(last) if done.returncode == 0 and last.isdigit() else None


def main() -> int:
    """Do the task of standard input; print the peak as the last line."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    config, _ = read_method(task.method, task.tokens)
    engine = EngineConfig(backend=task.backend, provider=task.provider, threads=task.threads)
    mode: Mode | None = "fast" if task.method == FAST else None
    with LLM(task.bundle, speculative=config, variant=task.variant, mode=mode, engine=engine, verify=False,
             prefix_bytes=0) as llm:  # fmt: skip
        llm.generate(list(task.prompt), SamplingParams(max_new_tokens=task.count))
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    print(f"\n{1024 * int(peak[1])}" if peak else "\nunknown")
    return 0


if __name__ == "__main__":
    sys.exit(main())

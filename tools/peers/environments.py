"""Virtual environments of the peers, in the cache folder: made by pip from pinned versions, and reused from then on.

One that is half made is never seen: it is made beside its place and renamed. What a peer does is not known here.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specdec.engines.cache import cache_dir
from specdec.engines.errors import EngineUnavailableError

INSTALL_SECONDS = 2 * 3600  # llama-cpp-python is compiled


def peers_dir() -> Path:
    """Where environments and converted models are kept."""
    return cache_dir() / "peers"


def environment_python(name: str, requirements: Sequence[str], tell: Callable[[str], None] = lambda line: None) -> Path:
    """Return the Python of an environment that has `requirements`, each pinned, making it first where there is none.

    `tell` is given a line before. Raises `EngineUnavailableError` with pip's own words when it cannot be made.
    """
    pinned = "\n".join((sys.version, *requirements))
    folder = peers_dir() / "environments" / f"{name}-{hashlib.sha256(pinned.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if python.is_file():
        return python
    tell(f"{name}: installing {', '.join(requirements)}")
    with made_whole(folder) as making:
        pip = [str(making / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_checked([sys.executable, "-m", "venv", str(making)], INSTALL_SECONDS, f"cannot install {name}")
        run_checked([*pip, *requirements], INSTALL_SECONDS, f"cannot install {name}")
    return python


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A place beside `folder` to make it in; it is renamed when that ends well, unless another command was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
        making = Path(temporary) / "made"
        yield making
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def run_checked(command: Sequence[str], seconds: float, failure: str) -> None:
    """Run a command to its end. Raises `EngineUnavailableError`: `failure`, and why, in one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired as exc:
        raise EngineUnavailableError(f"{failure}: no end within {seconds:g} s") from exc
    except OSError as exc:
        raise EngineUnavailableError(f"{failure}: {command[0]} cannot be started: {exc.strerror}") from exc
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith(("ERROR:", "error:"))] or lines
        raise EngineUnavailableError(f"{failure}: {told[-1] if told else f'exit code {done.returncode}'}")

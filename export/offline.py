"""What the offline commands share: the extra that brings their libraries, and those libraries' silence.

Importable without them. This module knows no command.
"""

import importlib
import os
import warnings
from collections.abc import Callable

from specdec.engines.command import run_command
from specdec.engines.errors import ExportError

EXTRA_MODULES = (
    *("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "gguf", "accelerate", "safetensors"),
    "rich",
)


def run_offline(prog: str, work: Callable[[], int], *, debug: bool) -> int:
    """`run_command` for work that needs the extra `export`: without it, the error says how to install it."""

    def with_extra() -> int:
        try:
            return work()
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] not in EXTRA_MODULES:
                raise
            raise ExportError(f'{exc.name} is not installed: pip install "specdec[export]"') from exc

    return run_command(prog, with_extra, debug=debug)


def hush() -> None:
    """Silence warnings, advice and progress bars of the libraries; their errors still come as exceptions."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    hub_logging = importlib.import_module("transformers.utils.logging")
    hub_logging.set_verbosity(50)
    hub_logging.disable_progress_bar()

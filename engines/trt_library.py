"""TensorRT and TensorRT-RTX as libraries: found, imported, heard. Nearly one API, so both are one module to the rest.

Whoever builds or runs engines is handed the module that `load_library` returns and imports neither by name. This module
knows how the two are installed and how they report; it knows no graph and no engine file.
"""

import importlib
import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from specdec.engines.errors import EngineUnavailableError

Backend = Literal["tensorrt", "tensorrt-rtx"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

Library = Any  # the module `tensorrt` or `tensorrt_rtx`: neither ships annotations

_MODULES: dict[Backend, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_EXTRAS: dict[Backend, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "rtx"}
# The library's tensor types, by the last part of their names, as numpy and the contract spell them.
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}
# Where in NVIDIA's sources a message arose: of no use to whoever reads it.
_PLACES = re.compile(r"^\w+::\w+: Error Code \d+: |\s*\bIn \S+ at /\S+:\d+|\[\w+\.cpp[^\]]*\]\s*", re.MULTILINE)


def load_library(backend: Backend) -> Library:
    """Import the library of `backend`. Raises `EngineUnavailableError` when it is not installed or does not load."""
    name = _MODULES[backend]
    install = f'pip install "specdec[{_EXTRAS[backend]}]"'
    if importlib.util.find_spec(name) is None:
        raise EngineUnavailableError(f"{backend} is not installed: {install}")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())
        raise EngineUnavailableError(f"{backend} is installed and does not load: {reason}; try {install}") from exc


@dataclass(slots=True)
class Messages:
    """What a library's logger has heard: errors and warnings, in order."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def reason(self) -> str:
        """The errors in one line, without the places in the library's sources; or that there were none."""
        found = dict.fromkeys(tidy(message) for message in self.errors)
        return "; ".join(found) or "the library gave no reason"


def tidy(message: str) -> str:
    """A vendor's message in one line, without places in its sources."""
    return " ".join(_PLACES.sub("", message).split())


def dtype_name(dtype: Any) -> str:
    """The contract's name for a type of the library, or the library's own where the contract has none."""
    name = str(dtype).rpartition(".")[2]
    return DTYPES.get(name, name)


def collecting_logger(library: Library) -> tuple[Any, Messages]:
    """A logger to hand to the library, and what it collects; nothing is printed.

    The caller keeps the logger for as long as anything made with it lives.
    """
    messages = Messages()

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                messages.errors.append(message)
            elif severity == library.ILogger.Severity.WARNING:
                messages.warnings.append(message)

    return Logger(), messages

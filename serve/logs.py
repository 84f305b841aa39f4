"""Structured logs: one JSON object a line, on standard error. What they may hold is decided by who writes them."""

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

import msgspec

LOGGER = logging.getLogger("specdec.serve")


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `event`, then the fields of the record, then a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return msgspec.json.encode(line).decode()


def log(event: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Log `event` with `fields`, which msgspec can encode."""
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)


def start_logging() -> None:
    """Send the server's records, and uvicorn's warnings, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("specdec.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

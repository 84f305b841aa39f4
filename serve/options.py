"""What an operator decides: `ServeOptions`, checked once, when it is made; and API keys from a file or the environment.

Names and defaults of the command line are read from here. This module knows no HTTP and no request.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from specdec.engines.errors import RequestError
from specdec.runtime.async_llm import MOST_WAITING

KEYS_VARIABLE = "SPECDEC_API_KEYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Limits of a server. Invalid values raise `RequestError`.

    `model`: the name that requests give; None: the bundle's. `api_keys`: any of them lets a request to /v1 in; without
    any, requests have to come for a loopback name, unless `no_auth`.

    `max_rows`, `max_queue` (requests that wait), `kv_bytes`: as in `AsyncLLM`. `max_body_bytes` of a request,
    `max_prompt_tokens` and `max_tokens` of a choice (None: the context), `max_choices` (`n` times prompts), `max_stop`
    texts of up to `max_stop_characters`. `deadline_seconds`: from a request's last byte to its answer's;
    `body_seconds`: for its head and for its body to come, and for a client that does not read to read on.
    `drain_seconds`: what is running when the server is told to stop has so long. `log_prompts`: texts of requests and
    answers are logged.
    """

    model: str | None = None
    api_keys: tuple[str, ...] = ()
    no_auth: bool = False
    max_rows: int | None = None
    max_queue: int = MOST_WAITING
    kv_bytes: int | None = None
    max_body_bytes: int = 2**20
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_choices: int = 16
    max_stop: int = 4
    max_stop_characters: int = 256
    deadline_seconds: float = 600.0
    body_seconds: float = 30.0
    drain_seconds: float = 30.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_queue", "kv_bytes", "max_body_bytes", "max_prompt_tokens", "max_tokens",
                     "max_choices", "max_stop", "max_stop_characters"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, not {value}")
        for name in ("deadline_seconds", "body_seconds", "drain_seconds"):
            if not 0 < getattr(self, name) <= 1e6:
                raise RequestError(f"{name} must be above 0 and at most 1e6, not {getattr(self, name)}")
        if not all(re.fullmatch("[!-~]+", key) for key in self.api_keys):
            raise RequestError("an API key is empty or has characters that no header can carry: use printable ASCII "
                               "without spaces")  # fmt: skip

    def check_host(self, host: str) -> None:
        """Raise `RequestError` when others than this machine could use the server without a key."""
        if not (self.api_keys or self.no_auth or is_loopback(host)):
            raise RequestError(
                f"{host} is no loopback address: others could use the server. Give it keys (--api-key-file, or the "
                f"variable {KEYS_VARIABLE}), or allow everyone with --no-auth"
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address, as in a URL, is this machine's own."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """API keys: lines of a file, without empty ones and those that begin with "#"; and the variable's, with commas.

    Raises `RequestError` when the file cannot be read or has none.
    """
    keys = [key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",")]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as exc:
            raise RequestError(f"the key file {file} cannot be read: {exc}") from exc
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise RequestError(f"the key file {file} has no key: write one a line")
        keys += found
    return tuple(key for key in keys if key)

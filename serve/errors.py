"""Errors as OpenAI's clients read them: a status, and a body that says what was wrong with which field.

Every error of a request becomes an `ApiError` here and nowhere else. This module knows error shapes; it answers nobody.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.engines.errors import BusyError, ClosedError, RequestError, SpecdecError

GONE = 499  # nginx's, for a client that left: it is in logs and metrics, never on a wire
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error. `param`: the field that it is about; `code`: for programs; `retry`: after seconds."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {} if retry is None else {"retry-after": str(retry)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"
        if status == 504:
            self.headers["x-should-retry"] = "false"  # OpenAI's clients would: the same again takes as long

    @property
    def body(self) -> bytes:
        """JSON, in OpenAI's shape."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def from_runtime(error: SpecdecError, retry: int) -> ApiError:
    """What the runtime said, as an answer; `retry`: seconds after which a refused request may be sent again."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="queue_full", retry=retry)
    if isinstance(error, ClosedError):
        return draining(retry)
    return ApiError(500, str(error), code="engine_error")


def draining(retry: int) -> ApiError:
    """The server is told to stop."""
    return ApiError(503, "the server is shutting down: send the request again", code="shutting_down", retry=retry)


def internal(request_id: str) -> ApiError:
    """Nobody foresaw it; the log has the rest."""
    return ApiError(500, f"an error of the server: its log has more, at request {request_id}", code="internal_error")


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found, as one answer: the problem that lies deepest, since alternatives fail at their tops too."""
    problem = max(problems, key=lambda each: len(each["loc"]))
    param = path_of(problem["loc"][1:])  # without "body"
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field: {param}", code="unknown_parameter", param=param)
    if problem["type"] == "unsupported":
        param = path_of([*problem["loc"][1:], problem["ctx"]["field"]])
        return ApiError(400, f"{param} is not supported by this server", code="unsupported_parameter", param=param)
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}", code="invalid_json")
    if not param and problem["type"] in ("model_attributes_type", "missing"):
        message = "the body must be a JSON object, sent with content-type: application/json"
        return ApiError(400, message, code="invalid_value")
    message = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {message}", code="invalid_value", param=param or None)


def path_of(location: Iterable[str | int]) -> str:
    """Where a field lies, as in messages[0].content; names of alternatives, which pydantic puts between, are left out.

    Those are types, such as `str` and `list[TextPart]`, or stand in brackets.
    """
    path, before = "", None
    for part in location:
        if before == "response_format":  # its type
            before = part
            continue
        before = part
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path

"""The exception tree. Vendor errors are mapped onto it where they arise (`raise ... from exc`) and nowhere else.

Every message is one line that says what is wrong and what to do; commands print it as it is; `RequestError`
is wrong usage (exit code 2), any other a failure (1).
This module knows no engine, no bundle and no request: it only names what can go wrong.
"""


class SpecdecError(Exception):
    """Base of everything that specdec raises on purpose."""


class BundleError(SpecdecError):
    """A bundle is missing, damaged, of another version, or does not hold what was asked for."""


class EngineError(SpecdecError):
    """An engine could not be loaded or failed while running."""


class EngineUnavailableError(EngineError):
    """The engine library, provider or driver that was asked for is not here; the message says how to install it."""


class ContractError(EngineError):
    """A graph or a chunk breaks the engine contract (shapes, dtypes, capacity)."""


class RequestError(SpecdecError):
    """A prompt, sampling parameter or option of a request is invalid."""


class BusyError(SpecdecError):
    """Too many requests wait; the same request may succeed later."""


class ClosedError(SpecdecError):
    """A service drains or is closed, and takes no new requests."""


class DeadEndError(RequestError):
    """The request's own terms leave no token possible at some position."""


class ExportError(SpecdecError):
    """A checkpoint could not be turned into a bundle."""


class SourceError(ExportError):
    """The checkpoint cannot be read, is unsafe (pickle, remote code) or is not reachable."""


class UnsupportedModelError(ExportError):
    """The checkpoint's family or one of its features cannot be expressed in the contract; the message names it."""


class PairError(ExportError):
    """Target and draft cannot work together; the message shows the first tokens that differ."""


class ResourceError(ExportError):
    """The disk or memory that the export needs is not there."""


class GateError(ExportError):
    """A check of the exported graph failed; the message says which, how far off, and where."""

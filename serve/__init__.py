"""The server: OpenAI's API over HTTP, on `AsyncLLM`."""

from specdec.serve.app import create_app
from specdec.serve.backend import Backend
from specdec.serve.options import ServeOptions

__all__ = ["Backend", "ServeOptions", "create_app"]

"""What all commands share: one-line errors, exit codes, signals, tracebacks only on demand.

It lies here because every layer may import `engines`; it knows no command. Exit codes: 0 done, 1 the work or the check
failed, 2 wrong usage, 128 + n ended by signal n.
"""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from specdec.engines.errors import RequestError, SpecdecError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal that ends the command; not an `Exception`, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number


class CommandParser(argparse.ArgumentParser):
    """argparse with examples kept as written, no abbreviated options, and errors of one line (exit code 2)."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    """Type of an option that counts: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def check_folders(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End with a usage error where the folder of a file to write is not there, before any work is done for it."""
    for name in names:
        path: Path | None = getattr(args, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name}: there is no folder {path.parent}")


def run_command(prog: str, work: Callable[[], int], *, debug: bool) -> int:
    """Run `work` and return its exit code, or that of the error or signal it ends with, told in one line."""
    try:
        with _signals_raised():
            return work()
    except Stopped as stop:
        print(f"{prog}: stopped by {signal.Signals(stop.number).name}", file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:  # the reader has gone (`| head`): nothing more is wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as exc:
        if debug:
            traceback.print_exc()
        known = isinstance(exc, SpecdecError)
        kind = "" if known else f"{type(exc).__name__}: "
        hint = "" if known or debug else f"; run {prog} again with --debug and report it"
        print(f"{prog}: error: {kind}{' '.join(str(exc).split())}{hint}", file=sys.stderr)
        return 2 if isinstance(exc, RequestError) else 1


@contextmanager
def _signals_raised() -> Iterator[None]:
    """While open, SIGINT and SIGTERM raise `Stopped`, so that what is half-done is cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread alone
        return
    previous = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""What all commands share: one-line usage errors, exit codes, tracebacks only on demand.

It lies here because every layer may import `engines`; it knows no command. Exit codes: 0 done, 1 the work or the check
failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from specdec.engines.errors import RequestError, SpecdecError


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


def run_command(prog: str, work: Callable[[], int], *, debug: bool) -> int:
    """Run `work` and return its exit code, or that of the error it ends with, printed as one line."""
    try:
        return work()
    except SpecdecError as exc:
        if debug:
            traceback.print_exc()
        print(f"{prog}: error: {' '.join(str(exc).split())}", file=sys.stderr)
        return 2 if isinstance(exc, RequestError) else 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130

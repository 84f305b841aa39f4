"""Conventions that every command shares."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from specdec.engines.command import CommandParser, run_command
from specdec.engines.errors import BundleError, RequestError


def fail_with(error: BaseException):
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BundleError("no bundle:\nexport one"), 1, "cmd: error: no bundle: export one"),
        (RequestError("top_p is off"), 2, "cmd: error: top_p is off"),
        (ValueError("odd"), 1, "cmd: error: ValueError: odd; run cmd again with --debug and report it"),
    ],
)
def test_an_error_is_one_line(error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("cmd", fail_with(error), debug=False) == code
    assert capsys.readouterr().err == line + "\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("cmd", fail_with(ValueError("odd")), debug=True) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("cmd: error: ValueError: odd\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_and_is_told(number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned: list[bool] = []

    def work() -> int:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except Exception:  # a signal is no exception of the work's
            return 0
        finally:
            cleaned.append(True)
        return 0

    before = signal.getsignal(number)
    assert run_command("cmd", work, debug=False) == code
    assert cleaned == [True]
    assert capsys.readouterr().err == f"cmd: stopped by {signal.Signals(number).name}\n"
    assert signal.getsignal(number) is before


def test_a_reader_that_has_gone_is_no_error() -> None:
    code = (
        "import sys\nfrom specdec.engines.command import run_command\n"
        "def work():\n    print('x' * 10**6, flush=True)\n    return 0\n"
        "sys.exit(run_command('cmd', work, debug=False))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(timeout=60) == 141
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()


def test_commands_run_in_other_threads_too() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_command("cmd", lambda: 3, debug=False)))
    thread.start()
    thread.join()
    assert codes == [3]


def test_usage_errors_are_one_line_and_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("cmd", "Does.", "examples: none")
    parser.add_argument("--length", type=int)
    for arguments in (["--len", "3"], ["--length", "x"], ["extra"]):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(arguments)
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("cmd: error: ")
        assert err.endswith("(see cmd --help)\n")
        assert err.count("\n") == 1

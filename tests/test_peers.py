"""The peer's process: its protocol, with a stand-in for its Python, and how its end is reported."""

import ast
import sys
from pathlib import Path

import pytest

from specdec.engines.errors import EngineError, EngineUnavailableError
from specdec.tools.genai import DRIVER, Answer, Genai
from support.fake_genai import fake_genai_python


def test_one_line_in_one_line_out(tmp_path: Path) -> None:
    peer = Genai(fake_genai_python(tmp_path), Path("folder"), 1)
    assert peer.version == "9.9"
    assert peer.generate([1, 2], 3) == Answer((1, 2, 1), 0.5)
    assert peer.generate([4], 1) == Answer((4,), 0.5)
    peer.close()


def test_a_peer_that_ends_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    peer = Genai(fake_genai_python(tmp_path), Path("folder"), 1)
    with pytest.raises(EngineError, match=r"^onnxruntime-genai has ended: no such token$"):
        peer.generate([0], 3)
    with pytest.raises(EngineError, match=r"^onnxruntime-genai has ended: no such token$"):
        peer.generate([1], 3)
    peer.close()


def test_a_python_without_the_package_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"^onnxruntime-genai has ended: ModuleNotFoundError: No module named 'onn"):
        Genai(sys.executable, Path("folder"), 1)


def test_a_missing_python_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match=r"/none cannot be started: No such file or directory$"):
        Genai(str(tmp_path / "none"), Path("folder"), 1)


def test_the_driver_is_python_and_times_all_but_the_first_token() -> None:
    ast.parse(DRIVER)
    before, _, after = DRIVER.partition("started = time.perf_counter()")
    assert before.count("generate_next_token()") == after.count("generate_next_token()") == 1
    assert "for _ in range(count - 1):" in after

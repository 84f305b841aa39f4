"""README's commands run in their order as they stand there; what holds for every page is in `test_docs.py`."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.bundles import blocks_checkpoint
from support.documents import ROOT, blocks

README = ROOT / "README.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my-model").symlink_to(blocks_checkpoint())
    return tmp_path


def test_the_python_example_is_short() -> None:
    (example,) = blocks(README, "python")
    assert len(example.strip().splitlines()) <= 12


@pytest.mark.slow
def test_the_commands_run_in_order(folder: Path) -> None:
    bin_folder = Path(sys.executable).parent
    (use,) = (block for block in blocks(README, "", "sh") if "specdec-export" in block)
    lines = [line.partition("#")[0].strip() for line in use.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("specdec-")]
    programs = ["specdec-export", "specdec-generate", "specdec-verify", "specdec-bench", "specdec-doctor"]
    assert [command[0] for command in commands] == programs
    for program, *arguments in commands:
        command = [str(bin_folder / program), *arguments]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

"""README's commands and example run as they stand there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.bundles import blocks_checkpoint, shared_bundle

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my-model").symlink_to(blocks_checkpoint())
    return tmp_path


def test_the_python_example_runs(folder: Path) -> None:
    (folder / "bundle").symlink_to(shared_bundle())
    (example,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert len(example.strip().splitlines()) <= 12


@pytest.mark.slow
def test_the_commands_run_in_order(folder: Path) -> None:
    bin_folder = Path(sys.executable).parent
    (use,) = (block for block in blocks("") if "specdec-export" in block)
    lines = [line.partition("#")[0].strip() for line in use.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("specdec-")]
    programs = ["specdec-export", "specdec-generate", "specdec-verify", "specdec-bench", "specdec-doctor"]
    assert [command[0] for command in commands] == programs
    for program, *arguments in commands:
        command = [str(bin_folder / program), *arguments]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"^make (\S+)", README.read_text(), re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []

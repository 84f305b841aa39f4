"""The wheel, and what it needs: built, installed into fresh virtual environments, and used there as a user would.

The lean runtime is a promise: with one engine library it generates text, without torch, transformers and onnx.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engines", "export", "runtime", "serve", "tools", "train")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORT_SECONDS = 1.0  # what `import specdec.runtime` may take

# Prints how long the import took and which modules it brought in.
TIME_IMPORT = """
import json, sys, time
start = time.perf_counter()
import specdec.runtime
print(json.dumps({"seconds": time.perf_counter() - start, "modules": sorted(sys.modules)}))
"""


def packages_on_disk() -> set[str]:
    """Dotted names of all folders that hold Python modules."""
    found = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return {".".join(("specdec", *path.parts)) for path in found}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where neither the repository nor this environment's settings are in reach."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def checked(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def new_environment(folder: Path, requirement: str) -> Path:
    """Make a virtual environment with `requirement` and return its folder of programs."""
    checked(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    checked(*pip, requirement, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that no earlier build can leak into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*FOLDERS, "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    checked(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def lean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a fresh environment with the wheel and the extra `cpu`."""
    return new_environment(tmp_path_factory.mktemp("lean") / "venv", f"{wheel}[cpu]")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with random weights."""
    from support.bundles import tiny_bundle

    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


def test_every_package_is_listed() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_package_is_typed_and_importable_in_an_editable_install() -> None:
    for package in packages_on_disk():
        folder = ROOT.joinpath(*package.split(".")[1:])
        assert (folder / "__init__.py").is_file(), package
        assert (folder / "py.typed").is_file(), package


def test_the_type_checkers_see_the_packages() -> None:
    for name in FOLDERS:
        link = ROOT / "typing_root" / "specdec" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"specdec", f"specdec-{PROJECT['project']['version']}.dist-info"}
    assert "specdec/__init__.py" not in names, "specdec is a namespace package"
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert f"specdec/{path.relative_to(ROOT).as_posix()}" in names
    for package in packages_on_disk():
        assert f"{package.replace('.', '/')}/py.typed" in names
    assert {"specdec/tools/bench.html.jinja", "specdec/serve/page.html"} <= set(names)
    assert not [name for name in names if "examples" in name or "fastapi" in name]
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_lean_environment_has_no_exporter(lean: Path, tmp_path: Path) -> None:
    listed = json.loads(checked(lean / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    installed = {re.sub("[-_.]+", "-", entry["name"]).lower() for entry in listed}
    assert {"specdec", "numpy", "msgspec", "tokenizers", "jinja2", "onnxruntime"} <= installed
    assert not installed & {"torch", "transformers", "onnx", "onnxscript", "onnx-ir", "safetensors", "accelerate"}


@pytest.mark.slow
def test_importing_the_runtime_is_quick_and_loads_no_engine(lean: Path, tmp_path: Path) -> None:
    tries = [json.loads(checked(lean / "python", "-c", TIME_IMPORT, cwd=tmp_path)) for _ in range(3)]
    assert min(one["seconds"] for one in tries) < IMPORT_SECONDS
    assert not {"onnxruntime", "tensorrt", "tensorrt_rtx"} & set(tries[0]["modules"])


@pytest.mark.slow
def test_the_doctor_works_in_the_lean_environment(lean: Path, tmp_path: Path) -> None:
    report = json.loads(checked(lean / "specdec-doctor", "--json", cwd=tmp_path))
    verdicts = {verdict["name"]: verdict for verdict in report["run"] + report["build"]}
    assert report["ok"] is True
    assert verdicts["ONNX Runtime on the CPU"]["ok"] is True
    assert verdicts["bundles for ONNX Runtime"]["fix"] == 'pip install "specdec[export]"'


@pytest.mark.slow
def test_the_lean_environment_generates(lean: Path, bundle: Path, tmp_path: Path) -> None:
    arguments = (bundle, "-p", "hello", "--raw", "--max-new-tokens", "8", "--json")
    answer = json.loads(checked(lean / "specdec-generate", *arguments, cwd=tmp_path))
    assert 1 <= len(answer["token_ids"]) <= 8
    assert all(isinstance(token, int) for token in answer["token_ids"])
    assert answer["stats"]["new_tokens"] == len(answer["token_ids"])


@pytest.mark.slow
def test_exporting_in_the_lean_environment_names_the_extra(lean: Path, tmp_path: Path) -> None:
    done = run(lean / "specdec-export", tmp_path, "-o", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("specdec-export: error: ")
    assert 'pip install "specdec[export]"' in line


@pytest.mark.slow
def test_without_an_engine_the_commands_name_the_extra(wheel: Path, bundle: Path, tmp_path: Path) -> None:
    programs = new_environment(tmp_path / "venv", str(wheel))
    done = run(programs / "specdec-generate", bundle, "-p", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("specdec-generate: error: ")
    assert 'pip install "specdec[cpu]"' in line
    doctor = run(programs / "specdec-doctor", cwd=tmp_path)
    assert doctor.returncode == 1
    assert '-> pip install "specdec[cpu]"' in doctor.stdout

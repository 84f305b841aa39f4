"""A bundle is complete or absent: staging, replacement, leftovers of killed runs, damage, disk and memory."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from specdec.engines.errors import BundleError, ExportError, ResourceError
from specdec.engines.manifest import MANIFEST_NAME, Manifest, Plan, encode, file_record, read_manifest, verify_files
from specdec.export import bundle as module
from specdec.export.bundle import (
    GIB,
    Staging,
    available_memory,
    check_disk,
    check_memory,
    remove_leftovers,
)
from support.bundles import shared_bundle


def bundle_files() -> list[str]:
    return sorted(read_manifest(shared_bundle()).files)


def stage(output: Path, *, force: bool = False, text: str = "one") -> Manifest:
    """Commit a bundle that holds `text` in every file of the shared bundle, under its manifest."""
    with Staging(output, force=force) as staging:
        (staging.path / "target" / "fp32").mkdir(parents=True)
        for name in bundle_files():
            (staging.path / name).write_text(text)
        files = staging.hash_files()
        manifest = msgspec.structs.replace(read_manifest(shared_bundle()), files=files)
        assert not output.exists() or force
        staging.commit(manifest)
    return manifest


def interrupted(output: Path, error: type[BaseException], *, force: bool = False) -> None:
    with Staging(output, force=force) as staging:
        (staging.path / MANIFEST_NAME).write_text("{}")
        raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_commit(tmp_path: Path) -> None:
    manifest = stage(tmp_path / "deep" / "bundle")
    assert names(tmp_path / "deep") == ["bundle"]
    files = bundle_files()
    assert names(tmp_path / "deep" / "bundle") == sorted([MANIFEST_NAME, *{name.partition("/")[0] for name in files}])
    assert sorted(manifest.files) == files
    assert "target/fp32/model.onnx" in files
    assert read_manifest(tmp_path / "deep" / "bundle") == manifest
    verify_files(tmp_path / "deep" / "bundle", manifest)
    assert (tmp_path / "deep" / "bundle").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_without_commit(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        interrupted(tmp_path / "bundle", error)
    assert names(tmp_path) == []


def test_an_existing_bundle_is_kept_unless_forced(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    stage(output, text="old")
    with pytest.raises(ExportError, match=r"bundle exists already: choose another output, or replace it with --force"):
        stage(output, text="new")
    assert (output / "target" / "fp32" / "model.onnx").read_text() == "old"
    stage(output, force=True, text="new")
    assert (output / "target" / "fp32" / "model.onnx").read_text() == "new"
    assert names(tmp_path) == ["bundle"]


def test_the_old_bundle_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    stage(output, text="old")
    with pytest.raises(RuntimeError):
        interrupted(output, RuntimeError, force=True)
    assert (output / "target" / "fp32" / "model.onnx").read_text() == "old"
    assert names(tmp_path) == ["bundle"]


def test_replacing_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "bundle"
    stage(output, text="old")
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: object())
    stage(output, force=True, text="new")
    assert (output / "target" / "fp32" / "model.onnx").read_text() == "new"
    assert names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("force", [True, False])
def test_other_folders_and_files_are_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    (tmp_path / "note").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for name, message in (("photos", "is not a bundle"), ("note", "is not a folder"), ("link", "is not a folder")):
        with pytest.raises(ExportError, match=message):
            stage(tmp_path / name, force=force)
    assert names(tmp_path) == ["link", "note", "photos"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with Staging(tmp_path / "bundle") as staging:
        staging.commit(read_manifest(shared_bundle()))
    assert names(tmp_path) == ["bundle"]
    assert names(tmp_path / "bundle") == [MANIFEST_NAME]


def test_two_exports_to_one_place(tmp_path: Path) -> None:
    with Staging(tmp_path / "bundle") as slow:
        stage(tmp_path / "bundle")
        assert slow.path.is_dir()  # the second one did not take the first one's folder for a leftover
        with pytest.raises(ExportError, match="exists already"):
            slow.commit(read_manifest(shared_bundle()))


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        stage(tmp_path / "file" / "bundle")


CHILD = """
import sys, time
from pathlib import Path
from specdec.export.bundle import Staging
with Staging(Path(sys.argv[1])) as staging:
    (staging.path / "target").mkdir()
    (staging.path / "target" / "model.onnx.data").write_bytes(bytes(1000))
    (staging.path / "specdec.json").write_text("{}")
    print(staging.path, flush=True)
    time.sleep(60)
"""


def test_kill_leaves_nothing_that_looks_like_a_bundle(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(output)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        partial = Path(child.stdout.readline().strip())
        assert partial.name.startswith(".bundle.partial-")
        assert remove_leftovers(output) == []  # its process lives
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert not output.exists()
    assert (partial / "target" / "model.onnx.data").exists()
    with pytest.raises(BundleError, match="is not a bundle"):
        read_manifest(output)
    stage(output)  # the next run for the same output clears up
    assert names(tmp_path) == ["bundle"]


def test_leftovers_of_other_outputs_and_young_folders_stay(tmp_path: Path) -> None:
    (tmp_path / ".other.partial-x").mkdir()
    (tmp_path / ".other.partial-x" / "file").write_text("")
    young, old = tmp_path / ".bundle.partial-young", tmp_path / ".bundle.partial-old"
    young.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    assert remove_leftovers(tmp_path / "bundle") == [old]
    assert names(tmp_path) == [".bundle.partial-young", ".other.partial-x"]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))


def verify(bundle: Path) -> None:
    verify_files(bundle, read_manifest(bundle))


@pytest.mark.parametrize("name", ["target/fp32/model.onnx", "target/fp32/model.onnx.data", "tokenizer.json"])
def test_damaged_files(damaged: Path, name: str) -> None:
    verify(damaged)
    path = damaged / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(BundleError, match=rf"{name} is damaged: {len(content) - 1} bytes instead of {len(content)}"):
        verify(damaged)
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(BundleError, match=rf"{name} is damaged: its SHA-256"):
        verify(damaged)
    path.unlink()
    with pytest.raises(BundleError, match=rf"incomplete: {name} is missing"):
        verify(damaged)


def test_damaged_manifests(damaged: Path) -> None:
    path = damaged / MANIFEST_NAME
    good = path.read_text()
    for change, message in (
        (('"schema_version": 1', '"schema_version": 2'), "schema_version 2 is not supported"),
        (('"contract_version": 1', '"contract_version": 7'), "contract_version 7 is not supported"),
        (('"limits"', '"limitz"'), "unknown field `limitz`|missing required field `limits`"),
        (('"max_batch": 8', '"max_batch": "8"'), "Expected `int`, got `str`"),
        (('"max_batch": 8', '"max_batch": 8, "max_bitch": 1'), "unknown field `max_bitch`"),
        (('"tokenizer.json"', '"../tokenizer.json"'), "lies outside the bundle"),
        ((good[len(good) // 2 :], ""), "not JSON"),
    ):
        assert change[0] in good
        path.write_text(good.replace(*change))
        with pytest.raises(BundleError, match=message) as caught:
            read_manifest(damaged)
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(BundleError, match=r"is not a bundle: no specdec.json \(make one with specdec-export\)"):
        read_manifest(damaged)


def test_plans_are_listed_verified_and_read_back(damaged: Path) -> None:
    manifest = read_manifest(damaged)
    variant = manifest.target.variants["fp32"]
    assert variant.plans == {}
    plan = Plan(
        backend="tensorrt-rtx",
        library="1.7.1",
        architectures=["sm89"],
        file="target/fp32/tensorrt-rtx-sm89.plan",
        max_batch=8,
        prefill_width=512,
        verify_width=64,
        capacity=1536,
        inputs={"input_ids": "int64"},
    )
    target = msgspec.structs.replace(
        manifest.target, variants={"fp32": msgspec.structs.replace(variant, plans={"tensorrt-rtx-sm89": plan})}
    )
    changed = msgspec.structs.replace(manifest, target=target)
    (damaged / MANIFEST_NAME).write_bytes(encode(changed))
    with pytest.raises(BundleError, match=r"needs target/fp32/tensorrt-rtx-sm89.plan and does not list it"):
        read_manifest(damaged)
    (damaged / plan.file).write_bytes(b"engine")
    listed = msgspec.structs.replace(changed, files={**manifest.files, plan.file: file_record(damaged / plan.file)})
    (damaged / MANIFEST_NAME).write_bytes(encode(listed))
    assert read_manifest(damaged).target.variants["fp32"].plans == {"tensorrt-rtx-sm89": plan}
    verify(damaged)
    (damaged / plan.file).write_bytes(b"enginf")
    with pytest.raises(BundleError, match=r"sm89.plan is damaged: its SHA-256"):
        verify(damaged)
    text = (damaged / MANIFEST_NAME).read_text()
    for change, message in (
        (('"backend": "tensorrt-rtx"', '"backend": "openvino"'), "Invalid enum value 'openvino'"),
        (('"max_batch": 8,\n', '"max_batch": 0,\n'), "Expected `int` >= 1"),
    ):
        assert change[0] in text
        (damaged / MANIFEST_NAME).write_text(text.replace(*change))
        with pytest.raises(BundleError, match=message):
            read_manifest(damaged)


def test_disk_is_checked_where_the_bundle_will_be(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_disk(tmp_path / "not" / "there" / "yet", free // 2)
    with pytest.raises(ResourceError, match=rf"needs 1048576.0 GiB on disk, {tmp_path} has \d+\.\d GiB free"):
        check_disk(tmp_path / "not" / "there" / "yet", 2**20 * GIB)


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    assert available_memory(proc, cgroup) is None  # nothing known: nothing refused
    proc.write_text(f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB\n")
    assert available_memory(proc, cgroup) == 6 * GIB
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text(f"{3 * GIB}\n")
    assert available_memory(proc, cgroup) == 6 * GIB
    (cgroup / "memory.max").write_text(f"{4 * GIB}\n")
    assert available_memory(proc, cgroup) == 1 * GIB
    (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    assert available_memory(proc, cgroup) == 3 * GIB
    monkeypatch.setattr(module, "available_memory", lambda: GIB)
    check_memory(GIB)
    with pytest.raises(ResourceError, match=r"needs 2\.0 GiB of memory, 1\.0 GiB are available"):
        check_memory(2 * GIB)

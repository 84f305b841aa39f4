"""A bundle is either complete or not there: everything is staged in a hidden sibling folder and renamed when whole.

`.{name}.partial-*` is that sibling. It holds a lock while its process lives (the kernel drops it at any death, `kill
-9` included), so the next run for the same output can tell a leftover from an export in progress. This module knows
files, disk and memory; it knows no model and no tokenizer.
"""

import ctypes
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.engines.errors import ExportError, ResourceError
from specdec.engines.manifest import MANIFEST_NAME, FileRecord, Manifest, encode, file_record

GIB = 2**30
_YOUNG_S = 60.0  # an empty staging folder younger than this may belong to a run that has not locked it yet
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # renameat2(2)


class Staging:
    """The hidden folder that becomes `output`; removed on any way out of the `with` block but `commit`.

    Raises `ExportError` when `output` exists and `force` is off, or is something that no export made.
    """

    def __init__(self, output: Path, *, force: bool = False) -> None:
        self._output = output.expanduser().absolute()
        self._force = force
        self.path = Path()
        self._lock = -1

    def __enter__(self) -> Self:
        parent = self._output.parent
        try:
            check_output(self._output, force=self._force)
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._output)
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(self._output), dir=parent))
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path.chmod(0o755)
        except OSError as exc:
            raise ExportError(f"{parent} cannot be written: {exc.strerror}") from exc
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # after a commit: nothing, or the bundle that was replaced
        os.close(self._lock)

    def hash_files(self) -> dict[str, FileRecord]:
        """Size and SHA-256 of every staged file, by name relative to the bundle."""
        return {str(file.relative_to(self.path)): file_record(file) for file in _files(self.path)}

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest last, flush everything to the disk, and put the folder in its place in one step."""
        partial = self.path / f".{MANIFEST_NAME}"
        try:
            partial.write_bytes(encode(manifest))
            for file in _files(self.path):
                _flush(file)
            partial.rename(self.path / MANIFEST_NAME)
            for folder in (self.path, *(path for path in self.path.rglob("*") if path.is_dir())):
                _flush(folder)
            check_output(self._output, force=self._force)  # another export may have finished meanwhile
            if self._output.exists():
                _exchange(self.path, self._output)
            else:
                self.path.rename(self._output)
            _flush(self._output.parent)
        except OSError as exc:
            raise ExportError(f"{self._output} cannot be written: {exc.strerror}") from exc


def check_output(output: Path, *, force: bool) -> None:
    """Raise `ExportError` when `output` may not be (re)placed: only a bundle or an empty folder ever is."""
    if not os.path.lexists(output):
        return
    if output.is_symlink() or not output.is_dir():
        raise ExportError(f"{output} exists and is not a folder: choose another output")
    if not any(output.iterdir()):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise ExportError(f"{output} exists and is not a bundle, so it is never replaced: choose another output")
    if not force:
        raise ExportError(f"{output} exists already: choose another output, or replace it with --force")


def remove_leftovers(output: Path) -> list[Path]:
    """Remove staging folders for `output` whose process is dead; return them."""
    removed = []
    for path in output.parent.glob(f"{_prefix(output).replace('[', '[[]')}*"):
        if path.is_dir() and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def check_disk(output: Path, need: int) -> None:
    """Raise `ResourceError` when fewer than `need` bytes are free where `output` will be."""
    existing = next(path for path in output.expanduser().absolute().parents if path.exists())
    if (free := shutil.disk_usage(existing).free) < need:
        raise ResourceError(f"the bundle needs {need / GIB:.1f} GiB on disk, {existing} has {free / GIB:.1f} GiB free")


def check_memory(need: int) -> None:
    """Raise `ResourceError` when the export needs more memory (bytes) than the machine or its cgroup has left."""
    available = available_memory()
    if available is not None and available < need:
        raise ResourceError(f"the export needs {need / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available")


def available_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can still be allocated: the system's MemAvailable, or less where a cgroup limits more."""
    found = []
    if proc.is_file():
        fields = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (cgroup / limit).is_file() and (cgroup / usage).is_file():
            text = (cgroup / limit).read_text().strip()
            if text.isdigit():  # "max" means no limit
                reclaimable = _inactive_file((cgroup / usage).with_name("memory.stat"))
                found.append(int(text) - int((cgroup / usage).read_text()) + reclaimable)
    return max(0, min(found)) if found else None


def _inactive_file(stat: Path) -> int:
    """Page cache that the cgroup counts as used and gives back under pressure."""
    lines = stat.read_text().splitlines() if stat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _prefix(output: Path) -> str:
    return f".{output.name}.partial-"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _is_abandoned(folder: Path) -> bool:
    """Whether no living process holds the folder's lock."""
    try:
        if not any(folder.iterdir()) and time.time() - folder.stat().st_mtime < _YOUNG_S:
            return False
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # its own process removed it just now
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: in one step where the system can, else with the old one set aside for a moment."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28; Linux only
    if exchange and exchange(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    aside = new.with_name(f"{new.name}.old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)

"""Writing a file so that a reader finds the old one or the new one, never a part."""

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, and rename it to `path` when it is whole and on the disk."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, path)

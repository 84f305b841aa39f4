"""Where specdec keeps what it can make or fetch again: fetched models, converted tokenizers. Outside any repository."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$SPECDEC_CACHE`, else `$XDG_CACHE_HOME/specdec`, else `~/.cache/specdec`."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"

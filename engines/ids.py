"""The reduced vocabulary of a drafter: which of the target's ids its logits are of, as a file of the bundle."""

from pathlib import Path

import numpy as np

from specdec.engines.contract import IntArray
from specdec.engines.errors import BundleError


def read_ids(path: Path, count: int, limit: int) -> IntArray:
    """The target's ids [count] in `path` (NumPy's format, no pickle), ascending, each once, all below `limit`.

    Raises `BundleError` for anything else.
    """
    try:
        ids: IntArray = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as exc:
        raise BundleError(f"{path} cannot be read as ids: {exc}; export or copy the bundle again") from exc
    if ids.dtype != np.int64 or ids.shape != (count,):
        raise BundleError(f"{path} holds {ids.dtype} {ids.shape}, not {count} ids; export the bundle again")
    if (ids[1:] <= ids[:-1]).any() or ids[0] < 0 or ids[-1] >= limit:
        raise BundleError(f"{path} must hold ascending ids below {limit}, each once; export the bundle again")
    return ids

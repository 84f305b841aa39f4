"""A peer's model from the weights that a bundle was made of, in the bundle's precision, kept in the cache folder.

A model that is half made is never seen: it is made beside its place and renamed. How a peer converts is its driver's
business; whether the weights are the bundle's is the caller's word.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from specdec.engines.errors import EngineUnavailableError, RequestError
from specdec.tools.peers.driver import Driver
from specdec.tools.peers.environments import made_whole, peers_dir, run_checked

CONVERT_SECONDS = 2 * 3600
Tell = Callable[[str], None]

# What a quantized checkpoint says of itself would be wrong of the fp32 one.
CHECKPOINT = """
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, place = sys.argv[1:3]
where = {"pretrained_model_name_or_path": os.path.dirname(source), "gguf_file": os.path.basename(source)}
tokenizer = AutoTokenizer.from_pretrained(**where)
model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
model.config.__dict__.pop("quantization_config", None)
model.hf_quantizer = None
model.is_quantized = False
model.save_pretrained(place)
tokenizer.save_pretrained(place)
"""


def converted(driver: Driver, python: str, source: Path, precision: str, tell: Tell = lambda line: None) -> Path:
    """Return the model of `driver` in `precision`, made of `source`, a GGUF file or a Hugging Face folder.

    It is made in the peer's own Python where the cache does not have it; `tell` is given a line before. Raises
    `EngineUnavailableError` when the peer has no such precision, does not read such a source, or fails, with its last
    words; `RequestError` when there is no such source.
    """
    if precision not in driver.precisions:
        raise EngineUnavailableError(
            f"{driver.title} is not run in {precision}; only in {', '.join(driver.precisions)}"
        )
    source = checked_source(source)
    if source.is_dir() and not driver.reads_folders:
        raise EngineUnavailableError(f"{driver.title} is given GGUF files here; give one with --peer-model")
    title = source.stem if source.is_file() else source.name
    if source.is_file() and not driver.reads_gguf:
        source = _made(driver, python, CHECKPOINT, source, f"{title}-{driver.name}-checkpoint", tell)
    if not driver.converter:
        return source
    made = _made(driver, python, driver.converter, source, f"{title}-{driver.name}-{precision}", tell)
    file = made / "model.gguf"
    return file if file.exists() else made


def checked_source(source: Path) -> Path:
    """Return the whole path of what can be converted. Raises `RequestError` when it is nothing of the kind."""
    if not (source.is_dir() or (source.is_file() and source.suffix == ".gguf")):
        raise RequestError(f"{source} is neither a .gguf file nor a folder: give the checkpoint with --peer-model")
    return source.resolve()


def _made(driver: Driver, python: str, script: str, source: Path, name: str, tell: Tell) -> Path:
    """The result of `script` in the cache, under `name` and a hash of all that it depends on."""
    what = name.rpartition("-")[2]
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(_files(source))]
    key = hashlib.sha256(repr((driver.requirements, script, stamps)).encode()).hexdigest()[:12]
    folder = peers_dir() / "models" / f"{name}-{key}"
    if folder.is_dir():
        return folder
    tell(f"{driver.title}: converting {source.name} ({what})")
    with made_whole(folder) as making:
        failure = f"{driver.title} cannot convert {source.name} to {what}"
        run_checked([python, "-c", script, str(source), str(making), what], CONVERT_SECONDS, failure)
        if not making.is_dir():
            raise EngineUnavailableError(f"{failure}: it wrote nothing")
    return folder


def _files(source: Path) -> list[Path]:
    return [source] if source.is_file() else [path for path in source.iterdir() if path.is_file()]

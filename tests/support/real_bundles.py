"""Real bundles that all tests of a run share: an export of SmolLM2 takes a minute and more."""

import functools
import subprocess
import sys
from pathlib import Path

from specdec.export.medusa_model import write_medusa
from specdec.tools.demo import DRAFTER
from specdec.tools.models import model_path
from support.bundles import session_folder
from support.heads import random_heads


def run(module: str, *arguments: object) -> None:
    """Run a command in a process of its own; it must succeed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@functools.cache
def smollm2_int8() -> Path:
    """With n-grams, the drafter that ships, three layers, and Medusa heads that say anything: they cost speed alone."""
    heads, output = session_folder() / "random-heads", session_folder() / "smollm2-int8"
    medusa = random_heads(576, 49152, draft_vocab_size=1024, shared_head=True)
    write_medusa(heads, medusa.config, medusa.state_dict())
    drafters = ["ngram", f"eagle:{DRAFTER}", f"medusa:{heads}", "layerskip:3"]
    options = [option for drafter in drafters for option in ("--drafter", drafter)]
    run("specdec.export.cli", model_path("smollm2"), "-o", output, "--precision", "int8", *options)
    return output


@functools.cache
def smollm2_int4() -> Path:
    """With n-grams, and itself in int8 as its draft model."""
    checkpoint, output = model_path("smollm2"), session_folder() / "smollm2-int4"
    options = ["--precision", "int4", "--drafter", "ngram", "--drafter", f"model:{checkpoint}"]
    run("specdec.export.cli", checkpoint, "-o", output, *options, "--draft-precision", "int8")
    return output

"""The options by which a command compares with peers, and what they open.

Which command that is, and what it measures, is not known here.
"""

import argparse
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from specdec.engines.errors import RequestError
from specdec.engines.manifest import read_manifest
from specdec.tools.peers.conversion import checked_source
from specdec.tools.peers.llama_cpp import LLAMA_CPP
from specdec.tools.peers.ort_genai import ORT_GENAI
from specdec.tools.peers.peer_set import PeerSet
from specdec.tools.peers.process import Peer
from specdec.tools.peers.registry import DRIVERS, asked_peers, drivers_of


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_peer_set` reads."""
    add = parser.add_argument
    add("--peers", metavar="PEER[:MODE[+MODE]],...", type=asked_peers, default={}, help="compare with these, each "
        f"installed and given the model by itself: {', '.join(DRIVERS)} (default of each: all its modes)")  # fmt: skip
    add("--peer-model", metavar="PATH", type=Path, help="what the bundle was exported from, for --peers: a .gguf file "
        "or a Hugging Face folder")  # fmt: skip
    add("--peer-draft", metavar="PATH", type=Path, help="a draft model for those of --peers that take one")
    add("--ort-genai", metavar="FOLDER", type=Path, help="compare with this model of onnxruntime-genai's builder")
    add("--llama-cpp", metavar="FILE", type=Path, help="compare with llama.cpp on this .gguf file")
    for driver, package in ((ORT_GENAI, "onnxruntime-genai"), (LLAMA_CPP, "llama-cpp-python")):
        add(f"--{driver.name}-python", metavar="PYTHON", default=sys.executable, help=f"Python that has {package} "
            "(default: this one)")  # fmt: skip


def open_peer_set(args: argparse.Namespace, threads: int, stack: ExitStack, bundle: Path) -> PeerSet:
    """Start the peers that were asked for; `stack` ends the processes. Those of `--peers` are set up first.

    They run in the precision of the target of `bundle`; one that cannot be set up is among the set's failures. Raises
    `RequestError` for wrong usage, `EngineError` when a model that was named cannot be loaded.
    """
    precision = next(iter(read_manifest(bundle).target.variants.values())).precision
    peers = PeerSet(precision, threads, stack)
    if args.peers and not args.peer_model:
        raise RequestError("--peers needs --peer-model: the .gguf file or the folder that the bundle was exported from")
    for path in (args.peer_model, args.peer_draft):
        if args.peers and path:
            checked_source(path)
    given = ((ORT_GENAI, args.ort_genai_python, args.ort_genai), (LLAMA_CPP, args.llama_cpp_python, args.llama_cpp))
    peers.peers += [
        stack.enter_context(closing(Peer(driver, python, model, threads))) for driver, python, model in given if model
    ]
    for driver, modes in drivers_of(args.peers):
        peers.add(driver, args.peer_model, args.peer_draft, modes)
    return peers

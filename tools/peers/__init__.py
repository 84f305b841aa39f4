"""Other runtimes to compare with, each in a virtual environment and process of its own.

`open_peer_set` starts what a command line asks for, keeps what fails, and sums up. What the prompts say, and what of
ours runs in between, is not known here.
"""

from specdec.tools.peers.driver import LOOP, PLAIN, Driver
from specdec.tools.peers.llama_cpp import LLAMA_CPP
from specdec.tools.peers.openvino import OPENVINO
from specdec.tools.peers.options import add_peer_options, open_peer_set
from specdec.tools.peers.ort_genai import ORT_GENAI
from specdec.tools.peers.peer_set import PeerSet
from specdec.tools.peers.process import Answer, Peer
from specdec.tools.peers.registry import DRIVERS
from specdec.tools.peers.report import ModeReport, PeerFailure, PeerReport, PeerRun, peer_table
from specdec.tools.peers.transformers import TRANSFORMERS

__all__ = [
    "DRIVERS", "LLAMA_CPP", "LOOP", "OPENVINO", "ORT_GENAI", "PLAIN", "TRANSFORMERS", "Answer", "Driver", "ModeReport",
    "Peer", "PeerFailure", "PeerReport", "PeerRun", "PeerSet", "add_peer_options", "open_peer_set",
    "peer_table",
]  # fmt: skip

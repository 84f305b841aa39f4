"""The peers by name, and how a command line asks for them. What is done with them is not known here."""

import argparse

from specdec.tools.peers.driver import Driver
from specdec.tools.peers.llama_cpp import LLAMA_CPP
from specdec.tools.peers.openvino import OPENVINO
from specdec.tools.peers.ort_genai import ORT_GENAI
from specdec.tools.peers.transformers import TRANSFORMERS

DRIVERS = {driver.name: driver for driver in (TRANSFORMERS, ORT_GENAI, LLAMA_CPP, OPENVINO)}
Asked = dict[str, tuple[str, ...]]  # modes by peer; none: all that it has


def asked_peers(text: str) -> Asked:
    """Read `PEER[:MODE[+MODE]],...`, the type of an option. Names that are not known are errors that list the known."""
    asked: Asked = {}
    for item in text.split(","):
        name, colon, modes = item.strip().partition(":")
        if name not in DRIVERS:
            raise argparse.ArgumentTypeError(f"there is no peer {name!r}; known: {', '.join(DRIVERS)}")
        if name in asked:
            raise argparse.ArgumentTypeError(f"{name} is named twice")
        known = DRIVERS[name].all_modes
        asked[name] = tuple(modes.split("+")) if colon else ()
        for mode in asked[name]:
            if mode not in known:
                raise argparse.ArgumentTypeError(f"{name} has no mode {mode!r}; known: {', '.join(known)}")
    return asked


def drivers_of(asked: Asked) -> list[tuple[Driver, tuple[str, ...]]]:
    """Drivers and the modes that were asked of each, in the order of the command line."""
    return [(DRIVERS[name], modes) for name, modes in asked.items()]

"""Options of the commands that run a bundle: what drafts, and which engine. Arguments in, an `LLM` out."""

import argparse
from typing import Any

from specdec.engines.registry import EngineConfig, backends
from specdec.runtime.config import TREES, SpeculativeConfig
from specdec.runtime.llm import LLM, Mode


def add_model_options(parser: argparse.ArgumentParser) -> Any:
    """Add the bundle, and the groups "speculation" and "engine"; return the first, for more of its kind."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder made by specdec-export")
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--method", default="auto", help="a drafter of the bundle, or ngram+DRAFTER (default "
                             "auto: the best that there is, as far as it pays)")  # fmt: skip
    speculation.add_argument("--num-speculative-tokens", type=int, metavar="K", help="most draft tokens a round")
    speculation.add_argument("--tree", choices=TREES, default="chain", help="shape of the drafts; trees "
                             "are lossless in law, not in bits (default %(default)s)")  # fmt: skip
    speculation.add_argument("--no-speculation", action="store_true", help="plain decoding")
    speculation.add_argument("--fast", action="store_true", help="allow one-token passes: faster plain decoding, gives "
                             "up bit equality with speculation and batches")  # fmt: skip
    engine = parser.add_argument_group("engine")
    engine.add_argument("--variant", help="precision of the target (default: the bundle's first)")
    engine.add_argument("--backend", default="ort", help=f"{' | '.join(backends())} (default %(default)s)")
    engine.add_argument("--provider", default="cpu", help="of ort: cpu, cuda, tensorrt, ... (default %(default)s)")
    engine.add_argument("--threads", type=int, help="threads of the engine (default: one per core)")
    return speculation


def open_model(args: argparse.Namespace) -> LLM:
    """Load the bundle as the options say. Raises as `LLM` does."""
    speculative = SpeculativeConfig(
        method=None if args.no_speculation else args.method,
        num_speculative_tokens=args.num_speculative_tokens,
        tree=args.tree,
    )
    engine = EngineConfig(backend=args.backend, provider=args.provider, threads=args.threads)
    mode: Mode | None = "fast" if args.fast else None
    return LLM(args.bundle, speculative=speculative, variant=args.variant, mode=mode, engine=engine)

"""`make engines`: a real model compiled with TensorRT-RTX, without a GPU, in every precision that it takes.

Each precision is exported as a user would, then its graph is compiled for each architecture; a row says what that took
and what the network holds. Nothing is run: this shows that the engines build, not that they are right or fast.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from specdec.engines.command import CommandParser, run_command
from specdec.engines.errors import SpecdecError
from specdec.engines.manifest import MANIFEST_NAME, read_manifest
from specdec.engines.trt_library import Backend
from specdec.tools.models import model_path

PROG = "python -m specdec.tools.engines"
BACKEND: Backend = "tensorrt-rtx"
PRECISIONS = ("fp16", "int8-w8a8", "fp8", "int4")
ARCHITECTURES = ("sm89", "sm120")
HEADER = ("model", "precision", "architecture", "seconds", "MB", "Q", "DQ", "KV", "attention", "layers")
EXAMPLES = """\
examples:
  python -m specdec.tools.engines
  python -m specdec.tools.engines --precision fp16 --arch sm86 --output /tmp/engines

A bundle that lies in the output folder already is taken as it is.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Export and compile; print one row for each engine."""
    parser = CommandParser(PROG, "Compile SmolLM2-135M with TensorRT-RTX, in every precision that it takes.", EXAMPLES)
    parser.add_argument("--output", type=Path, default=Path("build/engines"), help="folder of the bundles")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: all of them")
    parser.add_argument("--arch", action="append", metavar="SM", help=f"default: {' and '.join(ARCHITECTURES)}")
    args = parser.parse_args(argv)
    return run_command(PROG, partial(_compile, args), debug=args.debug)


def _compile(args: argparse.Namespace) -> int:
    architectures = args.arch or ARCHITECTURES
    print("  ".join(f"{title:>12}" for title in HEADER), flush=True)
    for precision in args.precision or PRECISIONS:
        bundle = args.output / precision
        if not (bundle / MANIFEST_NAME).is_file():
            _export(bundle, precision, architectures[0])
        for row in rows(bundle, architectures):
            print("  ".join(f"{cell:>12}" for cell in row), flush=True)
    return 0


def rows(bundle: Path, architectures: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Compile the target of `bundle` for each architecture; yield the cells of a row. The bundle is left as it is."""
    from specdec.export.tensorrt import build_plans

    manifest = read_manifest(bundle)
    for variant in manifest.target.variants.values():
        source = (bundle / variant.graph).absolute()
        for architecture in architectures:
            with tempfile.TemporaryDirectory() as scratch:  # links: the plan lies beside the graph that it is made from
                for file in source.parent.glob(f"{source.name}*"):
                    (Path(scratch) / file.name).symlink_to(file)
                (built,) = build_plans(
                    Path(scratch), source.name, manifest.target.spec, manifest.limits, BACKEND, [architecture]
                )
            counts = built.counts
            layers = (counts.quantize, counts.dequantize, counts.kv_updates, counts.attentions, counts.layers)
            took = (f"{built.seconds:.1f}", f"{built.nbytes / 1e6:.1f}")
            yield "SmolLM2-135M", variant.precision, architecture, *took, *map(str, layers)


def _export(bundle: Path, precision: str, architecture: str) -> None:
    """Export in a process of its own, as a user would: torch's memory does not stay with the builder."""
    bundle.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "specdec.export.cli", str(model_path("smollm2")), "-o", str(bundle)]
    command += ["--precision", precision, "--backend", BACKEND, "--arch", architecture]
    command += ["--max-batch", "4", "--max-length", "896", "--force"]
    if subprocess.run(command, check=False).returncode:
        raise SpecdecError(f"the export of {precision} failed: see above")


if __name__ == "__main__":
    sys.exit(main())

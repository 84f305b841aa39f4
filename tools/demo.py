"""The demonstration: export a real model with the drafter that ships, answer a few prompts, print what drafting gave.

Run by `make demo`. Plain decoding comes twice: at its fastest (mode `fast`), which speedups are measured against, and
in mode `exact`, which speculation reproduces bit for bit. Where one-token passes keep the bits, the two are the same.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from specdec.engines.command import CommandParser, run_command
from specdec.engines.errors import SpecdecError
from specdec.engines.prompts import PROMPTS
from specdec.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from specdec.tools.models import model_path

PROG = "python -m specdec.tools.demo"
DRAFTER = Path(__file__).resolve().parents[1] / "drafters" / "smollm2-135m-instruct"  # beside the sources
PRECISION = "int8"  # where it is fastest
METHODS = ("ngram", "eagle", "ngram+eagle")
SHOWN = ("summary", "edit", "extraction", "story")
EXAMPLES = "example:\n  python -m specdec.tools.demo --bundle build/smollm2 --max-new-tokens 96\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return its exit code."""
    parser = CommandParser(PROG, "Export SmolLM2-135M and generate with and without speculation.", EXAMPLES)
    parser.add_argument("--bundle", type=Path, default=Path("build/smollm2"), help="where to write the bundle")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="tokens per answer (default %(default)s)")
    args = parser.parse_args(argv)
    return run_command(PROG, partial(_demo, args), debug=args.debug)


def _demo(args: argparse.Namespace) -> int:
    _export(model_path("smollm2"), args.bundle)
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    methods = {
        "plain, fastest": LLM(args.bundle, speculative=SpeculativeConfig(method=None), mode="fast"),
        "plain, exact": LLM(args.bundle, speculative=SpeculativeConfig(method=None), verify=False),
        **{
            f"{method}, exact": LLM(args.bundle, speculative=SpeculativeConfig(method=method), verify=False)
            for method in METHODS
        },
    }
    table = _Table()
    for prompt in (prompt for prompt in PROMPTS if prompt.name in SHOWN):
        outputs = {
            name: llm.generate([llm.chat_prompt([{"role": "user", "content": prompt.text}])], params)[0]
            for name, llm in methods.items()
        }
        if prompt.name == SHOWN[0]:
            print(f"\n{prompt.text}\n\n-> {outputs['plain, exact'].text}\n")
        table.add(prompt.name, outputs)
    table.print()
    print(f"\nThe bundle is in {args.bundle}. Try: specdec-generate {args.bundle} -p 'Write a haiku about rivers.'")
    return 0 if table.identical else 1


def _export(checkpoint: Path, bundle: Path) -> None:
    """Export in a process of its own, as a user would: torch's memory does not stay with the runtime."""
    if not DRAFTER.is_dir():
        raise SpecdecError(f"{DRAFTER} is missing: run the demonstration in a clone of the repository")
    bundle.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "specdec.export.cli", str(checkpoint), "-o", str(bundle), "--force"]
    command += ["--precision", PRECISION, "--drafter", "ngram", "--drafter", f"eagle:{DRAFTER}"]
    if subprocess.run(command, check=False).returncode:
        raise SpecdecError("the export failed; its message is above")


class _Table:
    """Rows of figures, one for each prompt and method."""

    def __init__(self) -> None:
        from rich.table import Table

        self._table = Table(title="decode speed, and what speculation changed")
        for title in ("prompt", "method", "tokens/s", "τ", "acceptance", "speedup", "same as plain, exact"):
            self._table.add_column(title, justify="left" if title in ("prompt", "method") else "right")
        self.identical = True

    def add(self, prompt: str, outputs: dict[str, RequestOutput]) -> None:
        fastest, exact = outputs["plain, fastest"].stats, outputs["plain, exact"]
        for name, output in outputs.items():
            same = output.token_ids == exact.token_ids
            self.identical &= same or name == "plain, fastest"
            self._table.add_row(
                prompt,
                name,
                f"{output.stats.tokens_per_second:.1f}",
                f"{output.stats.mean_accepted_length:.2f}",
                f"{output.stats.acceptance_rate:.0%}" if output.stats.draft_tokens_proposed else "-",
                f"{output.stats.tokens_per_second / fastest.tokens_per_second:.2f}x",
                "yes" if same else "no",
            )
        self._table.add_section()

    def print(self) -> None:
        from rich.console import Console

        Console(width=110).print(self._table)


if __name__ == "__main__":
    sys.exit(main())

"""SmolLM2 in int8 and int4, exported by the command: what it costs in quality and memory, and no bit by speculation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.engines.manifest import read_manifest
from specdec.engines.prompts import PROMPTS
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig
from specdec.tools import verify
from support.real_bundles import smollm2_int4, smollm2_int8
from support.trace import recorded_logits

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(1200)]

GREEDY = SamplingParams(max_new_tokens=32)


@pytest.fixture(scope="module", params=["int8", pytest.param("int4", marks=pytest.mark.long)])
def bundle(request: pytest.FixtureRequest) -> Path:
    return {"int8": smollm2_int8, "int4": smollm2_int4}[request.param]()


def test_damage_is_small_and_every_bit_is_repeated(bundle: Path) -> None:
    target = read_manifest(bundle).target
    ((precision, variant),) = target.variants.items()
    assert variant.invariance.exact
    assert variant.parity.max_abs_error <= variant.parity.tolerance < 1e-3  # the weights are the grids' exactly
    assert variant.damage is not None
    assert variant.damage.tokens > 500
    assert variant.damage.mean_kl < {"int8": 0.004, "int4": 0.006}[precision]
    # Of 610 tokens 0.8 % are one standard error, and processors differ by as much (int8: 95.7 % on one without VNNI).
    assert variant.damage.top1_agreement > {"int8": 0.95, "int4": 0.94}[precision]


def test_speculation_changes_no_token_and_no_bit(bundle: Path) -> None:
    """By n-grams and a draft model; test_real_drafters.py has those that the target feeds."""
    methods = sorted({"ngram", "model"} & read_manifest(bundle).drafters.keys())
    with recorded_logits() as bits, LLM(bundle, speculative=SpeculativeConfig(method=None), verify=False) as plain:
        assert plain.mode == "exact"
        chats = [plain.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[:6]]
        expected = [plain.generate([chat], GREEDY)[0].token_ids for chat in chats]
    for method in methods:
        with (
            recorded_logits() as got,
            LLM(bundle, speculative=SpeculativeConfig(method=method, confidence_threshold=0.0), verify=False) as llm,
        ):
            outputs = [llm.generate([chat], GREEDY)[0] for chat in chats]
            together = llm.generate(chats[:4], GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert [output.token_ids for output in together] == expected[:4]
        assert got == bits
        assert sum(output.stats.draft_tokens_accepted for output in outputs) > 0


def test_the_verifier_passes(bundle: Path) -> None:
    arguments = [
        "--samples",
        "300",
        "--method",
        "ngram",
        "--acceptance",
        "block",
        "--limit",
        "3",
        "--max-new-tokens",
        "24",
    ]
    assert verify.main([str(bundle), *arguments]) == 0


def test_memory_is_the_weights_the_cache_and_250_mb(bundle: Path) -> None:
    code = (
        "import sys\n"
        "from specdec.runtime import LLM, SamplingParams, SpeculativeConfig\n"
        "with LLM(sys.argv[1], speculative=SpeculativeConfig(method='ngram')) as llm:\n"
        "    llm.generate('Name three rivers.', SamplingParams(max_new_tokens=64, ignore_eos=True))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    found = subprocess.run([sys.executable, "-c", code, str(bundle)], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    manifest = read_manifest(bundle)
    (variant,) = manifest.target.variants.values()
    allowed = manifest.files[f"{variant.graph}.data"].bytes + manifest.target.spec.kv_bytes(1, 256) + 250e6
    assert int(found.stdout) * 1024 <= allowed

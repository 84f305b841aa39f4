"""Drafters that the target feeds, on SmolLM2 in int8: the one that ships, random Medusa heads, the first layers.

None may change a token or a bit; the shipped one also has to be as good as it was when it was trained.
"""

import json
from pathlib import Path

import pytest

from specdec.engines.manifest import read_manifest
from specdec.engines.prompts import PROMPTS
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig
from specdec.tools.demo import DRAFTER
from support.real_bundles import smollm2_int8
from support.trace import recorded_logits

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(1200)]

GREEDY = SamplingParams(max_new_tokens=48)
LEARNED = {"eagle", "ngram+eagle"}
METHODS = ["eagle", "ngram+eagle", "medusa", "blockwise", "layerskip:3", "auto"]


@pytest.fixture(scope="module")
def bundle() -> Path:
    return smollm2_int8()


def test_speculation_changes_no_token_and_no_bit(bundle: Path) -> None:
    """Drafts of full length, and what the controller plans."""
    assert {*METHODS, "ngram"} - {"ngram+eagle", "auto"} == set(read_manifest(bundle).methods())
    with recorded_logits() as bits, LLM(bundle, speculative=SpeculativeConfig(method=None), verify=False) as plain:
        chats = [plain.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[:6]]
        expected = [plain.generate([chat], GREEDY)[0].token_ids for chat in chats]
    for method in METHODS:
        config = SpeculativeConfig(method=method, confidence_threshold=None if method == "auto" else 0.0)
        with recorded_logits() as got, LLM(bundle, speculative=config, verify=False) as llm:
            assert llm.mode == "exact"
            outputs = [llm.generate([chat], GREEDY)[0] for chat in chats]
            together = llm.generate(chats[:4], GREEDY)
        assert [output.token_ids for output in outputs] == expected, method
        assert [output.token_ids for output in together] == expected[:4], method
        assert got == bits, method
        assert sum(output.stats.draft_tokens_proposed for output in outputs) > (0 if method == "auto" else 50), method
        if method in LEARNED:
            assert sum(output.stats.draft_tokens_accepted for output in outputs) > 0, method


def test_a_seed_gives_one_text_with_and_without_the_drafter(bundle: Path) -> None:
    """`coupled`: sampled answers are plain decoding's, token for token."""
    params = SamplingParams(max_new_tokens=32, temperature=0.7, seed=5, acceptance="coupled")
    texts = []
    for method in (None, "eagle", "medusa"):
        with LLM(bundle, speculative=SpeculativeConfig(method=method), verify=False) as llm:
            chats = [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[:3]]
            texts.append([output.token_ids for output in llm.generate(chats, params)])
    assert texts[0] == texts[1] == texts[2]


def test_the_shipped_drafter_is_as_good_as_it_was(bundle: Path) -> None:
    """On prompts that it never saw; its figures on held-out texts are in `training.json`."""
    with LLM(bundle, speculative=SpeculativeConfig(method="eagle", num_speculative_tokens=2), verify=False) as llm:
        chats = [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS]
        stats = [output.stats for output in llm.generate(chats, SamplingParams(max_new_tokens=160))]
    first = sum(s.accepted_at[0] for s in stats) / sum(s.proposed_at[0] for s in stats)
    promised = json.loads((DRAFTER / "training.json").read_text())["acceptance"][0]
    assert first > 0.6 * promised
    assert (DRAFTER / "model.safetensors").stat().st_size < 20e6

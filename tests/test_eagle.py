"""EAGLE's drafter: files, graph and proposals against PyTorch's module, the runtime's text against plain decoding."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import DynamicCache

from specdec.engines.errors import BundleError, PairError, RequestError, SourceError, UnsupportedModelError
from specdec.engines.ids import read_ids
from specdec.engines.manifest import EagleDrafter as Record
from specdec.engines.manifest import encode, read_manifest, verify_files
from specdec.engines.registry import EngineConfig
from specdec.export.eagle_files import EMBEDDING, HEAD, IDS, draft_ids, read_eagle, write_eagle
from specdec.export.eagle_model import EagleModel, default_taps, eagle_config
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.report import make_report
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig
from specdec.runtime.drafters.eagle import EagleDrafter
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree
from specdec.tools.verify import main as verify
from support import models
from support.bundles import blocks_checkpoint
from support.eagles import DRAFTED, FORMATS, TAPS, eagle_bundle, random_eagle, shared_eagle, target_model

PROMPTS = [[40, 41, 42, 43, 40, 41], [7], [100, 5, 9], list(range(20, 50))]
STATIC = [[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]]


# The module


@pytest.mark.parametrize("form", FORMATS)
def test_pairs_one_by_one_are_pairs_in_one_pass(form: str) -> None:
    target = models.llama()
    config, _ = random_eagle(target, form)
    model = EagleModel(config).requires_grad_(False)
    tokens, features = torch.randint(0, 101, (2, 9)), torch.randn(2, 9, config.tapped_size)
    whole, kept = model(tokens, features), DynamicCache()
    for at in range(9):
        part = slice(at, at + 1)
        one = model(tokens[:, part], features[:, part], positions=torch.tensor([[at]]), cache=kept)
        assert torch.allclose(one.own, whole.own[:, part], atol=1e-5)
        assert torch.allclose(one.logits, whole.logits[:, part], atol=1e-5)


def test_default_taps_are_the_reference_implementations() -> None:
    assert default_taps(30) == ("2", "15", "27")
    assert default_taps(32) == ("2", "16", "29")
    assert default_taps(2) == ("1", "2")


# Files


def target_config(**changes: Any) -> Any:
    return models.llama(num_hidden_layers=6, **changes)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_read(form: str, tmp_path: Path) -> None:
    config, state = random_eagle(target_config(), form, 50)
    write_eagle(tmp_path / "eagle", config, state)
    found, tensors = read_eagle(tmp_path / "eagle", target_config())
    assert (found.format, found.taps, found.draft_vocab_size, found.bias) == (
        form,
        TAPS if form == "eagle3" else ("final",),
        50 if form == "eagle3" else 101,
        form == "eagle",
    )
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    ids = draft_ids(found, tensors)
    assert (ids is None) == (form == "eagle")
    if ids is not None:
        assert torch.equal(ids, state["t2d"].nonzero().flatten())
    assert sorted(file.name for file in (tmp_path / "eagle").iterdir()) == ["config.json", "model.safetensors"]


def test_a_public_config_without_taps_reads_the_default_ones(tmp_path: Path) -> None:
    target = target_config()
    config = eagle_config(target, draft_vocab_size=50, taps=default_taps(6))
    _, state = random_eagle(target, "eagle3", 50)
    state |= {"fc.weight": torch.zeros(48, 3 * 48)}
    write_eagle(tmp_path, config, state)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    assert raw.pop("eagle_aux_hidden_state_layer_ids") == [2, 3]
    path.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=r"fc\.weight is \[48, 144\], its config says \[48, 96\]"):
        read_eagle(tmp_path, target)


def test_taps_in_a_section_are_indices_of_layers(tmp_path: Path) -> None:
    """SGLang reads index i as what layer i leaves, behind i + 1 layers; vLLM's key at the top says the latter."""
    target = target_config()
    write_eagle(tmp_path, *random_eagle(target, "eagle3", 50))
    raw = json.loads((tmp_path / "config.json").read_text())
    top = raw.pop("eagle_aux_hidden_state_layer_ids")
    indices = [tap if tap == "final" else tap - 1 for tap in top]
    assert indices != top
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": indices}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_eagle(tmp_path, target)[0].taps == tuple(map(str, top))


def broken(state: dict[str, torch.Tensor], **changes: Any) -> dict[str, torch.Tensor]:
    made = {**state, **changes}
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize(
    ("config_changes", "tensors", "error", "message"),
    [
        ({"hidden_size": 64}, {}, PairError, "of hidden_size 64; this one's is 48"),
        ({"vocab_size": 99}, {}, PairError, "of vocab_size 99; this one's is 101"),
        ({"num_hidden_layers": 2}, {}, UnsupportedModelError, "a drafter is one llama layer"),
        ({"model_type": "mistral"}, {}, UnsupportedModelError, "a drafter is one llama layer"),
        ({"norm_before_residual": True}, {}, UnsupportedModelError, "norm_before_residual True"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 7]}, {}, PairError, "what 7 layers leave, the target has 6"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, {}, SourceError, "holds 0, not a number of layers"),
        ({}, {"norm.weight": None}, UnsupportedModelError, r"it has no norm\.weight"),
        ({}, {"fc.scale": torch.ones(1)}, UnsupportedModelError, r"it has fc\.scale as well"),
        ({}, {"norm.weight": torch.full((48,), torch.nan)}, SourceError, "not finite"),
        ({}, {IDS: None, "t2d": None}, UnsupportedModelError, "has no d2t that says which"),
        ({}, {IDS: torch.zeros(50, dtype=torch.int64) + 60}, SourceError, "d2t does not give ascending ids"),
        ({}, {IDS: torch.zeros(50, dtype=torch.int64)}, SourceError, "d2t and t2d name other tokens"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    config_changes: dict[str, Any], tensors: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    config, state = random_eagle(target_config(), "eagle3", 50)
    write_eagle(tmp_path, config, broken(state, **tensors))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config_changes))
    with pytest.raises(error, match=message):
        read_eagle(tmp_path, target_config())


def test_a_folder_that_is_no_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"its config\.json cannot be read"):
        read_eagle(tmp_path, target_config())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"has no model\.safetensors"):
        read_eagle(tmp_path, target_config())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(SourceError, match="truncated or damaged"):
        read_eagle(tmp_path, target_config())


# The bundle


@pytest.mark.parametrize(("form", "precision"), [("eagle3", "fp32"), ("eagle3", "int8"), ("eagle", "fp32")])
def test_the_graph_brings_its_own_weights_and_reads_the_targets(form: str, precision: str) -> None:
    """The embedding is stored once, although the folder of `eagle` brings it along as public ones do."""
    bundle = eagle_bundle(form, precision)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    record = manifest.drafters["eagle"]
    assert isinstance(record, Record)
    assert manifest.target.spec.taps == record.taps == (TAPS if form == "eagle3" else ("final",))
    (variant,) = record.model.variants.values()
    assert variant.graph == f"target/{precision}/eagle.onnx"
    assert variant.parity.max_abs_error < variant.parity.tolerance
    assert variant.invariance.exact
    spec = record.model.spec
    assert (spec.features, spec.logits_size) == ((192, DRAFTED) if form == "eagle3" else (64, 336))
    files: dict[str, set[str]] = {}
    for name, value in ir.load(bundle / variant.graph).graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            files.setdefault(str(value.const_value.location), set()).add(name.partition(".weight")[0])
    borrowed = {"model.embed_tokens"} | ({"lm_head"} if form == "eagle" else set())
    assert files.pop("model.onnx.data") == borrowed
    assert all(name.startswith("eagle.") for name in files.pop("eagle.onnx.data"))
    assert not files


def test_a_draft_precision_that_cannot_read_the_targets_embedding_is_refused(tmp_path: Path) -> None:
    drafter = shared_eagle("eagle3")
    for own in ("fp16", "fp8"):
        options: dict[str, Any] = {"model": str(blocks_checkpoint()), "output": tmp_path / "bundle"}
        with pytest.raises(RequestError, match=r"which is float32 at fp32: .* from fp32, int8, int4$"):
            export_bundle(ExportOptions(drafters=(f"eagle:{drafter}",), draft_precision=own, **options))
    assert not (tmp_path / "bundle").exists()


def test_a_drafter_without_an_engine_that_hands_out_states_is_refused() -> None:
    with pytest.raises(RequestError, match="reads hidden states, which backend ort alone hands out"):
        ExportOptions(model="model", output=Path("bundle"), drafters=("eagle:x",), backends=("tensorrt-rtx",))
    with pytest.raises(RequestError, match="drafter eagle: needs a checkpoint, as in eagle:DIR"):
        ExportOptions(model="model", output=Path("bundle"), drafters=("eagle:",))
    with pytest.raises(RequestError, match="reads the target's hidden states, which only backend ort hands out"):
        LLM(
            eagle_bundle(),
            speculative=SpeculativeConfig(method="eagle"),
            engine=EngineConfig(backend="tensorrt"),
        )


def test_a_manifest_whose_drafter_fits_no_target_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(eagle_bundle())
    record = manifest.drafters["eagle"]
    path = tmp_path / "specdec.json"
    other = msgspec.structs.replace(record, taps=("2",))
    path.write_bytes(encode(msgspec.structs.replace(manifest, drafters={"eagle": other})))
    with pytest.raises(BundleError, match="drafter eagle reads taps that the target lacks"):
        read_manifest(tmp_path)
    files = {name: one for name, one in manifest.files.items() if not name.endswith(".npy")}
    path.write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(BundleError, match=r"needs target/fp32/eagle\.ids\.npy and does not list it"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("ids", [[1, 2], [3, 2, 1], [-1, 2, 3], [1, 2, 9], [[1, 2, 3]], [1.0, 2.0, 3.0], [1, 1, 2]])
def test_ids_that_are_no_vocabulary_are_refused(ids: list[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array(ids))
    with pytest.raises(BundleError, match=r"not 3 ids|ascending ids below 9, each once"):
        read_ids(tmp_path / "ids.npy", 3, 9)
    (tmp_path / "ids.npy").write_bytes(b"nothing")
    with pytest.raises(BundleError, match="cannot be read"):
        read_ids(tmp_path / "ids.npy", 3, 9)


# The runtime


class TorchDraft:
    """What to propose, by PyTorch alone: the target's states of a whole text, then the drafter's own, step by step."""

    def __init__(self, form: str) -> None:
        target = target_model()
        config, state = read_eagle(shared_eagle(form), target.config)
        self.target, self.config, self.ids = target, config, draft_ids(config, state)
        self.model = EagleModel(config).requires_grad_(False)
        lent = {EMBEDDING: target.get_input_embeddings().weight, HEAD: target.get_output_embeddings().weight}
        own = {name: value for name, value in state.items() if name not in (IDS, "t2d")}
        self.model.load_state_dict({**lent, **own})

    def best(self, text: Sequence[int], draft: Sequence[int], count: int) -> list[int]:
        """The most probable `count` target ids after `text` and the drafted tokens `draft`."""
        with torch.no_grad():
            states = self.target(torch.tensor([list(text[:-1])]), output_hidden_states=True).hidden_states
            taps = [states[-1] if tap == "final" else states[int(tap)] for tap in self.config.taps]
            features = torch.cat(taps, -1)  # [1, n - 1, T * H]
            own = torch.zeros(1, len(text) - 1, self.config.llama.hidden_size)
            tokens = list(text[1:])
            for token in draft:
                left = self.model.states(torch.tensor([tokens]), features, own)[:, -1:]
                features = torch.cat([features, torch.zeros_like(features[:, :1])], 1)
                own, tokens = torch.cat([own, left], 1), [*tokens, token]
            logits = self.model(torch.tensor([tokens]), features, own).logits[0, -1]
        ids = torch.arange(len(logits)) if self.ids is None else self.ids
        known = ids < 320  # the tokenizer's
        return ids[known][logits[known].argsort(descending=True)[:count]].tolist()


@cache
def torch_draft(form: str) -> TorchDraft:
    return TorchDraft(form)


def watched(patch: pytest.MonkeyPatch) -> list[tuple[list[int], TokenTree]]:
    """Every proposal, with the text that it was made for."""
    found: list[tuple[list[int], TokenTree]] = []
    propose = EagleDrafter.propose

    def watching(self: EagleDrafter, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        trees = propose(self, rows, limits)
        found.extend((list(row.tokens), tree) for row, tree in zip(rows, trees, strict=True))
        return trees

    patch.setattr(EagleDrafter, "propose", watching)
    return found


def greedy(bundle: Path, prompts: Sequence[Sequence[int]], tokens: int = 14, **options: Any) -> list[tuple[int, ...]]:
    with LLM(bundle, speculative=SpeculativeConfig(**options), verify=False) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("form", FORMATS)
def test_chains_are_those_of_the_torch_module(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch, one of a single token; the pairs of what was accepted have the target's features."""
    found = watched(monkeypatch)
    greedy(eagle_bundle(form), PROMPTS, method="eagle", num_speculative_tokens=3)
    draft, checked = torch_draft(form), 0
    for text, tree in found:
        assert len(text) > 1 or len(tree) == 0
        for node, token in enumerate(tree.tokens):
            assert draft.best(text, tree.tokens[:node], 1) == [token]
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("form", FORMATS)
def test_trees_are_those_of_the_torch_module(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(monkeypatch)
    greedy(eagle_bundle(form), PROMPTS[2:], tokens=8, method="eagle", tree=STATIC)
    draft, checked = torch_draft(form), 0
    for text, tree in found:
        if len(tree) < len(STATIC):  # near the end
            continue
        level = [[token] for token in draft.best(text, [], 2)]
        expected = list(level)
        for _ in range(2):
            level = [[*path, *draft.best(text, path, 1)] for path in level]
            expected += level
        assert sorted(tree.text(node) for node in range(len(tree))) == sorted(expected)
        checked += 1
    assert checked > 5


@pytest.mark.parametrize(("form", "precision"), [("eagle3", "fp32"), ("eagle3", "int8"), ("eagle", "fp32")])
def test_the_text_and_its_bits_are_plain_decodings(form: str, precision: str) -> None:
    bundle = eagle_bundle(form, precision)
    plain = greedy(bundle, PROMPTS, 24, method=None)
    assert greedy(bundle, PROMPTS, 24, method="eagle") == plain
    assert greedy(bundle, PROMPTS, 24, method="eagle", num_speculative_tokens=4) == plain
    assert greedy(bundle, PROMPTS[:1], 24, method="eagle", num_speculative_tokens=6) == plain[:1]
    if precision == "fp32":  # trees are lossless in law, not in bits
        assert greedy(bundle, PROMPTS, 24, method="eagle", tree="dynamic") == plain


def test_a_chain_stops_where_the_draft_is_not_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(monkeypatch)
    greedy(eagle_bundle(), PROMPTS, method="eagle", num_speculative_tokens=4, confidence_threshold=1.0)
    assert {len(tree) for text, tree in found if len(text) > 1} <= {0, 1}
    found.clear()
    greedy(eagle_bundle(), PROMPTS, method="eagle", num_speculative_tokens=4, confidence_threshold=0.0)
    assert max(len(tree) for _, tree in found) == 4


# specdec-verify


def test_specdec_verify_passes(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = eagle_bundle()
    capsys.readouterr()
    size = ["--quick", "--samples", "40", "--limit", "1", "--acceptance", "token", "--batch-size", "2"]
    assert verify([str(bundle), *size, "--method", "eagle"]) == 0
    assert "drafters: eagle" in capsys.readouterr().out


def test_a_manifest_has_to_list_the_drafters_own_files(tmp_path: Path) -> None:
    manifest = read_manifest(eagle_bundle())
    graph = next(iter(manifest.drafters["eagle"].model.variants.values())).graph  # type: ignore[union-attr]
    for name in (graph, f"{graph}.data"):
        files = {other: one for other, one in manifest.files.items() if other != name}
        (tmp_path / "specdec.json").write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
        with pytest.raises(BundleError, match=f"needs {name} and does not list it"):
            read_manifest(tmp_path)


def test_passes_of_a_drafter_that_takes_features_are_timed() -> None:
    bundle = eagle_bundle()
    report = make_report(bundle, read_manifest(bundle))
    assert [engine.role for engine in report] == ["target", "eagle"]
    assert all(cost.best_ms > 0 for engine in report for cost in engine.pass_costs)

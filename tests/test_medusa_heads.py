"""Medusa heads as a folder and as a graph: both formats against the formula, what is refused, what a bundle holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specdec.engines.contract import HeadsSpec
from specdec.engines.errors import (
    BundleError,
    ContractError,
    EngineError,
    ExportError,
    GateError,
    RequestError,
    SourceError,
)
from specdec.engines.ids import read_ids
from specdec.engines.manifest import MedusaDrafter, encode, read_manifest, verify_files
from specdec.engines.ort_heads import OrtHeads
from specdec.engines.registry import EngineConfig, open_heads
from specdec.export.medusa import check_heads, heads_graph
from specdec.export.medusa_model import MedusaModel, read_medusa, write_medusa
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.weights import write_graph
from specdec.runtime import LLM, SpeculativeConfig
from support.bundles import shared_checkpoint
from support.heads import ACCURACIES, medusa_bundle, random_heads

HIDDEN, VOCAB = 32, 50
TARGET = LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=2)
FORMS: dict[str, dict[str, Any]] = {
    "public": {},
    "public, two blocks": {"layers": 2, "heads": 2},
    "one head": {"heads": 1, "accuracies": ACCURACIES[:1]},
    "shared projection": {"shared_head": True},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "shared and reduced": {"shared_head": True, "draft_vocab_size": 20},
}
STATES = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)


def written(folder: Path, **changes: Any) -> MedusaModel:
    """Random heads, written to `folder`."""
    heads = random_heads(HIDDEN, VOCAB, **{"accuracies": (), **changes})
    write_medusa(folder, heads.config, heads.state_dict())
    return heads


def by_the_formula(folder: Path, states: np.ndarray) -> np.ndarray:
    """Logits [B, heads, Vd] from the file's tensors: x + silu(W x + b), block by block, then the projection."""
    tensors = {name: tensor.double().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    found = []
    for head in range(config["medusa_num_heads"]):
        x = states.astype(np.float64)
        for block in range(config["medusa_num_layers"]):
            y = x @ tensors[f"{head}.{block}.linear.weight"].T + tensors[f"{head}.{block}.linear.bias"]
            x = x + y / (1 + np.exp(-y))
        last = f"{head}.{config['medusa_num_layers']}.weight"
        found.append(x @ tensors["lm_head.weight" if "lm_head.weight" in tensors else last].T)
    return np.stack(found, axis=1)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_read_and_exported_as_the_formula_says(form: str, tmp_path: Path) -> None:
    made = written(tmp_path / "heads", **FORMS[form])
    heads = read_medusa(tmp_path / "heads", TARGET)
    assert heads.config == made.config
    expected = by_the_formula(tmp_path / "heads", STATES)
    with torch.inference_mode():
        assert np.abs(heads(torch.from_numpy(STATES)).numpy() - expected).max() < 1e-4
    config = heads.config
    spec = HeadsSpec(heads=config.heads, hidden_size=HIDDEN, logits_size=config.logits_size)
    weights = {name: tensor for name, tensor in heads.state_dict().items() if name != "d2t"}
    write_graph(heads_graph(config, spec), weights, tmp_path / "model.onnx")
    engine = OrtHeads(tmp_path / "model.onnx", spec, threads=1)
    assert np.abs(engine.logits(STATES) - expected).max() < 1e-4
    assert check_heads(engine, heads, STATES).max_abs_error < 1e-4
    with pytest.raises(GateError, match=r"Medusa heads are .* off PyTorch"):
        check_heads(engine, random_heads(HIDDEN, VOCAB, 1, **FORMS[form]), STATES)
    if config.draft_vocab_size is not None:
        offsets = load_file(tmp_path / "heads" / "model.safetensors")["d2t"]
        assert heads.ids is not None
        assert heads.ids.tolist() == [place + int(offset) for place, offset in enumerate(offsets)]


def test_a_public_folder_may_leave_sizes_out_and_have_its_own_fields(tmp_path: Path) -> None:
    made = written(tmp_path)
    public = {
        "medusa_num_heads": 3,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "transformers_version": "4.31.0",
    }
    (tmp_path / "config.json").write_text(json.dumps(public))
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    assert read_medusa(tmp_path, TARGET).config == made.config


def test_heads_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    heads = written(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["config.json", "model.safetensors"]
    state = heads.state_dict()
    del state["1.0.linear.bias"]
    with pytest.raises(SourceError, match=r"lacks the tensor 1\.0\.linear\.bias"):
        write_medusa(tmp_path, heads.config, state)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# What is refused


def changed(**fields: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: config.update(fields)


def dropped(name: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    def drop(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return drop


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: tensors.update({name: tensor})


REFUSED = {
    "field": (changed(num_heads=3), "has the field num_heads, which is not one of Medusa heads"),
    "no heads": (changed(medusa_num_heads=0), "medusa_num_heads must be a whole number of at least 1, not 0"),
    "layers": (changed(medusa_num_layers="1"), "medusa_num_layers must be a whole number of at least 1, not '1'"),
    "hidden size": (changed(hidden_size=64), "heads of hidden_size 64, the target's is 32"),
    "vocabulary": (changed(vocab_size=51), "heads of vocab_size 51, the target's is 50"),
    "number of heads": (changed(medusa_num_heads=2), "says medusa_num_heads 2, the weights are of 3: correct"),
    "accuracies": (changed(accuracies=[[0.5], [0.4]]), "shares from 0 to 1, a list of ranks for each of 3 heads"),
    "a share": (changed(accuracies=[[0.5], [0.4], [1.5]]), "shares from 0 to 1"),
    "missing": (dropped("1.0.linear.bias"), r"lacks the tensor 1\.0\.linear\.bias \(1 missing in all\)"),
    "offsets": (dropped("d2t"), r"lacks the tensor d2t"),
    "unknown": (put("0.7.linear.weight", torch.ones(3)), r"has the tensor 0\.7\.linear\.weight, which is not one of"),
    "shape": (put("0.1.weight", torch.ones(20, 31)), r"0\.1\.weight has shape \[20, 31\], the target needs \[20, 32\]"),
    "descending": (put("d2t", torch.arange(20, 0, -1) * 2), "d2t must be int64 and give ascending ids, each once"),
    "type": (put("d2t", torch.zeros(20)), "d2t must be int64"),
    "outside": (put("d2t", torch.full((20,), 31)), "d2t gives ids outside the target's vocabulary of 50"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    change, said = REFUSED[case]
    written(tmp_path, draft_vocab_size=20)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=said):
        read_medusa(tmp_path, TARGET)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no config\.json: not a folder of Medusa heads"):
        read_medusa(tmp_path, TARGET)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}')
    with pytest.raises(SourceError, match=r"has no weights: neither model\.safetensors nor medusa_lm_head"):
        read_medusa(tmp_path, TARGET)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(SourceError, match=r"pickled weights only \(medusa_lm_head\.pt\), which can run code: convert"):
        read_medusa(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(SourceError, match="truncated or damaged"):
        read_medusa(tmp_path, TARGET)


def test_options_that_heads_cannot_have_are_refused(tmp_path: Path) -> None:
    for drafters, options, said in (
        (("medusa:",), {}, "drafter medusa: needs a checkpoint, as in medusa:DIR"),
        (("medusa:a", "medusa:b"), {}, "one drafter of each kind"),
        (("medusa:a",), {"backends": ("tensorrt-rtx",)}, "hidden states, which backend ort alone hands out"),
    ):
        with pytest.raises(RequestError, match=said):
            ExportOptions(model="m", output=tmp_path, drafters=drafters, **options)
    options = ExportOptions(
        model=str(shared_checkpoint()), output=tmp_path / "bundle", drafters=(f"medusa:{tmp_path / 'heads'}",)
    )
    written(tmp_path / "heads")
    with pytest.raises(ExportError, match="heads of hidden_size 32, the target's is 48"):
        export_bundle(options)
    assert not (tmp_path / "bundle").exists()


# The bundle


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_bundle_holds_the_heads_and_what_was_measured(precision: str) -> None:
    reduced = {"draft_vocab_size": 300, "shared_head": True} if precision == "int8" else {}
    bundle = medusa_bundle(precision, **reduced)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    record = manifest.drafters["medusa"]
    assert isinstance(record, MedusaDrafter)
    assert manifest.target.spec.taps == ("final",)
    assert manifest.methods() == ["ngram", "medusa", "blockwise"]
    assert record.accuracies == [list(ranks) for ranks in ACCURACIES]
    assert record.parity.max_abs_error < record.parity.tolerance
    size = manifest.target.spec.logits_size
    assert record.precision == precision
    assert record.spec.logits_size == (300 if reduced else size)
    files = {name.rpartition("/")[2] for name in manifest.files if name.startswith("drafter/medusa/")}
    assert files == {"model.onnx", "model.onnx.data"} | ({"ids.npy"} if reduced else set())
    if record.ids is not None:  # 8 bits a weight, and a scale for 32 of them
        assert len(read_ids(bundle / record.ids, 300, size)) == 300
        weights = 64 * (3 * 64 + 300)
        assert manifest.files["drafter/medusa/model.onnx.data"].bytes < weights * (1 + 4 / 32) + 4 * 3 * 64 + 4096
        with pytest.raises(BundleError, match="not 299 ids"):
            read_ids(bundle / record.ids, 299, size)
        with pytest.raises(BundleError, match="ascending ids below 100"):
            read_ids(bundle / record.ids, 300, 100)


def test_a_manifest_whose_heads_have_no_states_to_read_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(medusa_bundle())
    spec = msgspec.structs.replace(manifest.target.spec, taps=("1",))
    target = msgspec.structs.replace(manifest.target, spec=spec)
    (tmp_path / "specdec.json").write_bytes(encode(msgspec.structs.replace(manifest, target=target)))
    with pytest.raises(BundleError, match="drafter medusa reads hidden states that the target lacks"):
        read_manifest(tmp_path)
    files = {name: record for name, record in manifest.files.items() if "medusa" not in name}
    (tmp_path / "specdec.json").write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(BundleError, match=r"needs drafter/medusa/model\.onnx and does not list it"):
        read_manifest(tmp_path)


def test_the_engine_of_heads_takes_what_their_record_says() -> None:
    bundle = medusa_bundle()
    record = read_manifest(bundle).drafters["medusa"]
    assert isinstance(record, MedusaDrafter)
    heads = open_heads(bundle / record.graph, record.spec, EngineConfig(threads=1))
    assert heads.logits(np.zeros((2, 48), np.float32)).shape == (2, 3, record.spec.logits_size)
    with pytest.raises(ContractError, match="heads take rows of 48"):
        heads.logits(np.zeros((2, 47), np.float32))
    heads.close()
    heads.close()
    with pytest.raises(EngineError, match="the heads are closed"):
        heads.logits(np.zeros((2, 48), np.float32))
    with pytest.raises(ContractError, match="the manifest says"):
        open_heads(bundle / record.graph, msgspec.structs.replace(record.spec, heads=2))
    with pytest.raises(RequestError, match=r"reads the target.s hidden states, which only backend ort hands out"):
        LLM(bundle, speculative=SpeculativeConfig(method="medusa"), engine=EngineConfig(backend="tensorrt"))

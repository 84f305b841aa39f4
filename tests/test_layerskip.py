"""The target's first layers as its draft: the graph that is cut out, one data file, one cache, the same bits."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from specdec.engines.contract import ModelSpec
from specdec.engines.errors import BundleError, ContractError, EngineError, ExportError, RequestError
from specdec.engines.manifest import LayerSkipDrafter, encode, read_manifest, verify_files
from specdec.engines.ort import OrtEngine
from specdec.engines.ort_kv import OrtKV
from specdec.engines.registry import EngineConfig
from specdec.export.layers import LAYER
from specdec.export.layerskip import first_layers, shallow
from specdec.export.lower_ort import lower_for_ort
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.trace import model_spec, trace
from specdec.export.weights import save_graph, write_graph
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig, kv
from specdec.runtime.drafters.layerskip import LayerSkipDrafter as Drafter
from specdec.runtime.kv import BorrowedModel, CachedModel
from specdec.runtime.request import Row
from specdec.runtime.tree import TokenTree
from support import models, scoring
from support.bundles import quantized_bundle, shared_bundle, shared_checkpoint
from support.trace import recorded_logits

SKIP = "layerskip:1"
TOKENS = np.random.default_rng(0).integers(3, 101, (2, 30))
PROMPTS = [
    "the quick brown fox",
    "one, two, three; one, two, three; one,",
    "d",
    "def add(a, b):\n    return a + b\n\ndef add(",
]


def skip_bundle() -> Path:
    return shared_bundle(drafters=("ngram", SKIP))


def engines(bundle: Path, method: str = SKIP) -> tuple[OrtEngine, OrtEngine]:
    """The target's engine and its draft's."""
    manifest = read_manifest(bundle)
    drafter = manifest.drafters[method]
    assert isinstance(drafter, LayerSkipDrafter)
    found = [
        OrtEngine(bundle / next(iter(model.variants.values())).graph, model.spec, threads=1)
        for model in (manifest.target, drafter.model)
    ]
    return found[0], found[1]


# The graph


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_cut_of_every_family_is_pytorchs_model_of_so_many_layers(family: str, tmp_path: Path) -> None:
    model = models.random_model(models.FAMILIES[family]())
    spec = model_spec(model.config, 101, "float32")
    graph = lower_for_ort(trace(model.config), spec)
    write_graph(graph, model.state_dict(), tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx.data").read_bytes()
    whole = scoring.reference(model, TOKENS[0])
    for layers in range(1, spec.num_layers):
        path = tmp_path / f"first-{layers}.onnx"
        save_graph(first_layers(graph, layers), path, "model.onnx.data", graph)
        engine = OrtEngine(path, msgspec.structs.replace(spec, num_layers=layers), threads=1)
        found = scoring.score(engine, TOKENS, [20, 3, 1])
        with shallow(model, layers) as part:
            expected = np.stack([scoring.reference(part, row) for row in TOKENS])
        assert float(np.abs(found - expected).max()) < 1e-4
        assert float(np.abs(expected[0] - whole).max()) > 0.1  # it is another model
    assert (tmp_path / "model.onnx.data").read_bytes() == before
    assert np.array_equal(scoring.reference(model, TOKENS[0]), whole)  # `shallow` gave the layers back
    assert model.config.num_hidden_layers == spec.num_layers


@cache
def llama() -> ir.Model:
    return trace(models.llama())


def traced() -> ir.Model:
    """A graph of three layers, to be changed."""
    return llama().clone()


def test_a_graph_is_cut_inside_only_and_only_at_a_mark() -> None:
    graph = traced()
    for layers in (0, 3, 4):
        with pytest.raises(ExportError, match=f"cannot be cut after {layers} of its 3 layers"):
            first_layers(graph, layers)
    for node in graph.graph:
        for value in node.outputs:
            value.meta.clear()
    with pytest.raises(ExportError, match="cannot be cut after 1 of its 0 layers: no hidden state is marked"):
        first_layers(graph, 1)


def test_a_cut_that_would_read_a_later_layer_is_refused() -> None:
    graph = traced()
    marked = {value.meta[LAYER]: value for node in graph.graph for value in node.outputs if LAYER in value.meta}
    marked[0].meta[LAYER], marked[1].meta[LAYER] = 1, 0
    with pytest.raises(ExportError, match=r"cannot be cut after 1 of its layers: they read past_key_values\.1\.key"):
        first_layers(graph, 1)


def test_a_parameter_that_the_data_file_lacks_is_refused(tmp_path: Path) -> None:
    graph = traced()
    cut = first_layers(graph, 1)
    with pytest.raises(ExportError, match=r"parameter model\.layers\.1\..* is not in model\.onnx\.data"):
        save_graph(graph, tmp_path / "model.onnx", "model.onnx.data", cut)


# The bundle


def data_of(path: Path) -> dict[str, tuple[object, ...]]:
    """Where the parameters of a graph lie, by name."""
    found = {}
    for name, value in ir.load(path).graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            tensor = value.const_value
            found[name] = (tensor.location, tensor.offset, tensor.length, tensor.dtype, tuple(tensor.shape.numpy()))
    return found


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_draft_reads_the_targets_file_and_brings_no_weight(precision: str) -> None:
    bundle = skip_bundle() if precision == "fp32" else quantized_bundle(precision)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    drafter = manifest.drafters[SKIP]
    assert isinstance(drafter, LayerSkipDrafter)
    assert drafter.model.spec == msgspec.structs.replace(manifest.target.spec, num_layers=1)
    variant = drafter.model.variants[precision]
    assert variant.graph == f"target/{precision}/layerskip-1.onnx"
    assert variant.parity.max_abs_error < variant.parity.tolerance
    assert variant.invariance.exact
    assert sorted(name for name in manifest.files if name.startswith("target/")) == [
        f"target/{precision}/{name}" for name in ("layerskip-1.onnx", "model.onnx", "model.onnx.data")
    ]
    target, draft = (data_of(bundle / "target" / precision / name) for name in ("model.onnx", "layerskip-1.onnx"))
    assert len(draft) > 5
    assert draft.items() < target.items()
    assert not any(".layers.1." in name for name in draft)


def export(output: Path, *drafters: str, **options: Any) -> None:
    export_bundle(ExportOptions(model=str(shared_checkpoint()), output=output, drafters=drafters, **options))


def test_a_draft_has_to_skip_a_layer(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"^drafter layerskip:2 has to skip a layer: the model has 2, choose 1 to 1$"
    ):
        export(tmp_path / "bundle", "layerskip:2")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["layerskip:0", "layerskip:", "layerskip:-1", "layerskip:x", "layerskip:01"])
def test_a_depth_is_a_number(name: str) -> None:
    with pytest.raises(RequestError, match=f"drafter {name} needs a number of layers, as in layerskip:8"):
        ExportOptions(model="model", output=Path("bundle"), drafters=(name,))


def test_a_draft_without_an_engine_that_shares_its_cache_is_refused() -> None:
    with pytest.raises(RequestError, match="shares the target's cache, which backend ort alone can"):
        ExportOptions(model="model", output=Path("bundle"), drafters=(SKIP,), backends=("tensorrt-rtx",))
    with pytest.raises(RequestError, match=f"drafter {SKIP} shares the target's cache, which only backend ort can"):
        LLM(skip_bundle(), speculative=SpeculativeConfig(method=SKIP), engine=EngineConfig(backend="tensorrt"))


def test_a_manifest_whose_draft_fits_no_target_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(skip_bundle())
    drafter = manifest.drafters[SKIP]
    other = msgspec.structs.replace(drafter, model=msgspec.structs.replace(drafter.model, variants={}))
    path = tmp_path / "specdec.json"
    path.write_bytes(encode(msgspec.structs.replace(manifest, drafters={SKIP: other})))
    with pytest.raises(BundleError, match=f"drafter {SKIP} has other variants than the target"):
        read_manifest(tmp_path)
    files = {name: record for name, record in manifest.files.items() if "layerskip" not in name}
    path.write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(BundleError, match=r"needs target/fp32/layerskip-1\.onnx and does not list it"):
        read_manifest(tmp_path)


# The cache


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_first_layers_write_the_targets_bits(precision: str) -> None:
    target, draft = engines(skip_bundle() if precision == "fp32" else quantized_bundle(precision))
    wide, narrow = target.allocate(2, 128), draft.allocate(2, 128)
    target.step(scoring.chain(TOKENS, [0, 0]), wide)
    for start in (0, 10, 20):
        draft.step(scoring.chain(TOKENS[:, start : start + 10], [start, start]), narrow)
    for row in (0, 1):
        assert np.array_equal(wide.read(row, 30)[:2], narrow.read(row, 30))
        assert np.array_equal(wide.first_layers(1).read(row, 30), narrow.read(row, 30))


def test_first_layers_are_the_same_memory_and_follow_its_growth() -> None:
    target, draft = engines(skip_bundle())
    whole = target.allocate(1, 128)
    part = whole.first_layers(1)
    draft.step(scoring.chain(TOKENS[:1, :9], [0]), part)
    for rows, capacity in ((1, 128), (3, 256)):
        whole.resize(rows, capacity, 9)
        assert (part.rows, part.capacity) == (rows, capacity)
        assert [part.view(index, 0) for index in (0, 1)] == [whole.view(index, 0) for index in (0, 1)]
        assert part.nbytes == whole.nbytes // 2 == sum(array.nbytes for array in whole._memory.host[:2])
        draft.step(scoring.chain(TOKENS[:1, 9:12], [9]), part)
        own = draft.allocate(1, 128)
        draft.step(scoring.chain(TOKENS[:1, :12], [0]), own)
        assert np.array_equal(whole.read(0, 12)[:2], own.read(0, 12))
    with pytest.raises(EngineError, match="a cache of 2 layers has no first 3"):
        whole.first_layers(3)


def test_an_engine_takes_no_cache_of_another_depth() -> None:
    target, draft = engines(skip_bundle())
    chunk = scoring.chain(TOKENS[:1, :3], [0])
    with pytest.raises(ContractError, match="a cache of 2 layers, the engine has 1"):
        draft.step(chunk, target.allocate(1, 128))
    with pytest.raises(ContractError, match="a cache of 1 layers, the engine has 2"):
        target.step(chunk, target.allocate(1, 128).first_layers(1))


class Watched:
    """What a run allocates, where its draft lies, and what it proposes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocated: list[OrtKV] = []
        self.sizes: list[tuple[int, int, int]] = []  # rows, capacity and bytes that the buffers ever had
        self.proposed: list[TokenTree] = []
        self.places: set[tuple[bool, ...]] = set()
        allocate, propose = OrtKV.allocate.__func__, Drafter.propose  # type: ignore[attr-defined]
        resize = OrtKV.resize

        def allocating(cls: type[OrtKV], spec: ModelSpec, device: str, rows: int, capacity: int) -> OrtKV:
            self.allocated.append(allocate(cls, spec, device, rows, capacity))
            self.sizes.append((rows, capacity, self.allocated[-1].nbytes))
            return self.allocated[-1]

        def resizing(buffers: OrtKV, rows: int, capacity: int, used: int) -> None:
            resize(buffers, rows, capacity, used)
            self.sizes.append((rows, capacity, buffers.nbytes))

        def proposing(drafter: Drafter, rows: Sequence[Row], limits: Sequence[int], *prices: Any) -> list[TokenTree]:
            trees: list[TokenTree] = propose(drafter, rows, limits, *prices)
            self.proposed += trees
            target, draft = drafter._borrowed._target.kv, drafter._borrowed.kv
            if isinstance(target, OrtKV) and isinstance(draft, OrtKV):  # they are there once something was drafted
                shared = [target.view(index, 0) == draft.view(index, 0) for index in range(2 * draft.layers)]
                self.places.add(tuple(shared))
            return trees

        patch.setattr(OrtKV, "allocate", classmethod(allocating))
        patch.setattr(OrtKV, "resize", resizing)
        patch.setattr(Drafter, "propose", proposing)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 48, "ignore_eos": True, **options})


def load(method: str | None = SKIP, **options: Any) -> LLM:
    """Drafts of full length."""
    options = {"confidence_threshold": 0.0, **options}
    return LLM(skip_bundle(), speculative=SpeculativeConfig(method=method, **options))


def test_a_batch_allocates_the_targets_cache_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, held = [*PROMPTS, [5] * 300], []  # the last prompt makes the cache grow
    skip_bundle()  # its export allocates, too
    watched = Watched(monkeypatch)
    for method in (None, SKIP):
        with load(method) as llm:
            llm.generate(prompts, params())
        (own,) = watched.allocated
        held.append((own.layers, *max(watched.sizes)))
        watched.allocated, watched.sizes = [], []
    assert held[0] == held[1]
    assert held[0][:3] == (2, 5, 384)
    assert watched.places == {(True, True)}


def long_prompt(length: int) -> list[int]:
    return (TOKENS.ravel().tolist() * 5)[:length]


@pytest.mark.parametrize("length", [118, 122, 125])
def test_drafts_do_not_notice_that_the_cache_grows_under_them(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers (128 slots at first) grow in the middle of a chain, whose first tokens the next ones attend."""
    skip_bundle()  # its export allocates, too
    watched = Watched(monkeypatch)
    batch = [long_prompt(length), long_prompt(20)]
    found = []
    for bucket in (kv.capacity_bucket, lambda slots: 1024):
        monkeypatch.setattr(kv, "capacity_bucket", bucket)
        with load(num_speculative_tokens=6) as llm, recorded_logits() as bits:
            texts = [output.token_ids for output in llm.generate(batch, params(temperature=1.0, seed=3))]
        drawn_from = [[q.tobytes() for q in tree.q or () if q is not None] for tree in watched.proposed]
        assert any(drawn_from)
        found.append((texts, bits, [tree.tokens for tree in watched.proposed], drawn_from))
        watched.proposed.clear()
        assert max(capacity for _, capacity, _ in watched.sizes) == (256 if len(found) == 1 else 1024)
        watched.sizes.clear()
    assert found[0] == found[1]


# The runtime


def test_what_lies_behind_the_committed_slots_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that drafts may write there: with all of it soiled before every pass, the same text and bits."""
    with load(None) as llm, recorded_logits() as expected:
        texts = [output.token_ids for output in llm.generate(PROMPTS, params())]
    run = CachedModel._run
    soiled = []

    def soiling(self: CachedModel, inputs: Sequence[Any], first_row: int) -> np.ndarray:
        if not isinstance(self, BorrowedModel) and self.kv is not None:
            for array in self.kv._memory.host:  # type: ignore[attr-defined]
                for row in range(first_row, min(first_row + len(inputs), self.kv.rows)):
                    array[row, :, int(self.lens[row]) :] = 1e4
            soiled.append(len(inputs))
        return run(self, inputs, first_row)

    monkeypatch.setattr(CachedModel, "_run", soiling)
    with load() as llm, recorded_logits() as found:
        assert [output.token_ids for output in llm.generate(PROMPTS, params())] == texts
    assert found == expected
    assert len(soiled) > 20


def test_drafts_are_accepted_and_rejected_and_the_text_stays() -> None:
    with load(None) as llm:
        texts = [output.token_ids for output in llm.generate(PROMPTS, params())]
    for options in ({}, {"tree": "dynamic", "num_speculative_tokens": 12}):
        with load(**options) as llm:
            outputs = llm.generate(PROMPTS, params())
        stats = [output.stats for output in outputs]
        assert [output.token_ids for output in outputs] == texts
        assert 0 < sum(one.draft_tokens_accepted for one in stats) < sum(one.draft_tokens_proposed for one in stats)


def test_rows_that_end_at_different_times_keep_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join, leave and change places in the target's cache; each gets the proposals that it gets alone."""
    watched = Watched(monkeypatch)
    each = [
        params(max_new_tokens=count, temperature=1.0, seed=count) for count in (3, 30, 11, 1, 17, 8, 2, 40, 5, 9, 21)
    ]
    prompts = [long_prompt(7 + 3 * index) for index in range(len(each))]
    with load() as llm:
        alone = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, each, strict=True)]
        trees = sorted(tree.tokens for tree in watched.proposed)
        watched.proposed.clear()
        together = llm.generate(prompts, each)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert sorted(tree.tokens for tree in watched.proposed) == trees
    assert len(set(trees)) > 20

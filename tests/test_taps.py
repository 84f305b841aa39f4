"""Hidden states of a graph, against PyTorch's: every family, every tap, any split; rows keep theirs until taken."""

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch

from specdec.engines.chunk import RowInput, pack
from specdec.engines.errors import ContractError, EngineError, ExportError, RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.ort import OrtEngine
from specdec.export.layerskip import first_layers
from specdec.export.lower_ort import lower_for_ort
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.export.taps import add_taps
from specdec.export.trace import model_spec, trace
from specdec.export.weights import write_graph
from specdec.runtime.kv import CachedModel
from support import models
from support.bundles import shared_bundle, shared_checkpoint

TOKENS = np.random.default_rng(0).integers(3, 101, 30).tolist()


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_tap_of_every_family_is_pytorchs_hidden_state(family: str, tmp_path: Path) -> None:
    model = models.random_model(models.FAMILIES[family]())
    spec = model_spec(model.config, 101, "float32")
    taps = (*(str(layer) for layer in range(1, spec.num_layers)), "final")
    spec = msgspec.structs.replace(spec, taps=taps)
    graph = lower_for_ort(add_taps(trace(model.config), spec), spec)
    write_graph(graph, model.state_dict(), tmp_path / "model.onnx")
    cached = CachedModel(
        OrtEngine(tmp_path / "model.onnx", spec, threads=1), max_rows=2, min_width=1, keeps_hidden=True
    )
    for row in range(2):
        cached.add_row()
        cached.prefill(row, TOKENS[row : 20 + row])
    cached.step([RowInput(TOKENS[20:24], 4), RowInput(TOKENS[21:23], 2)])
    cached.commit(0, range(3))
    cached.commit(1, range(2))
    for row, count in enumerate((23, 22)):
        with torch.no_grad():
            states = model(torch.tensor([TOKENS[row : row + count]]), output_hidden_states=True).hidden_states[1:]
        assert np.abs(cached.take_hidden(row) - torch.cat(states, -1)[0].numpy()).max() < 1e-4
        assert cached.take_hidden(row).shape == (0, spec.tapped_size)


def test_hidden_states_follow_their_row_and_the_path_that_was_kept(tmp_path: Path) -> None:
    """The last row takes the place of one that leaves; of a tree, only the accepted path's states are kept."""
    bundle = export_bundle(
        ExportOptions(
            model=str(shared_checkpoint()), output=tmp_path / "bundle", drafters=("none",), taps=("1", "final")
        )
    )
    graph = next(iter(bundle.target.variants.values())).graph
    engine = OrtEngine(tmp_path / "bundle" / graph, bundle.target.spec, threads=1)
    cached = CachedModel(engine, max_rows=2, min_width=1, keeps_hidden=True)
    for row in range(2):
        cached.add_row()
        cached.prefill(row, TOKENS[row:5])
    cached.step([RowInput(TOKENS[5:6], 1), RowInput(TOKENS[5:9], 4, [-1, 0, 0, 2])])
    cached.commit(0, [0])
    cached.commit(1, [0, 2, 3])
    cached.drop_row(0)
    alone = CachedModel(engine, max_rows=1, min_width=1, keeps_hidden=True)
    alone.add_row()
    alone.prefill(0, [*TOKENS[1:6], *TOKENS[7:9]])
    assert np.abs(cached.take_hidden(0) - alone.take_hidden(0)).max() < 1e-5


def test_a_tap_that_is_not_there_is_refused_before_any_work(tmp_path: Path) -> None:
    for taps, said in ((("3",), "the model has 2"), (("0",), "number of layers"), (("1", "1"), "stand once")):
        with pytest.raises(RequestError, match=said):
            export_bundle(ExportOptions(model=str(shared_checkpoint()), output=tmp_path / "bundle", taps=taps))
    with pytest.raises(RequestError, match="backend ort alone"):
        ExportOptions(model="m", output=tmp_path, backends=("tensorrt-rtx",), archs=("sm89",), taps=("final",))
    assert not list(tmp_path.iterdir())


def test_a_graph_and_a_manifest_that_disagree_on_hidden_states_are_an_error() -> None:
    bundle = shared_bundle()
    manifest = read_manifest(bundle)
    spec = msgspec.structs.replace(manifest.target.spec, taps=("final",))
    graph = bundle / next(iter(manifest.target.variants.values())).graph
    with pytest.raises(ContractError, match="hidden"):
        OrtEngine(graph, spec)
    with pytest.raises(EngineError, match="no hidden states"):
        OrtEngine(graph, manifest.target.spec).allocate(1, 128).hidden  # noqa: B018 - reading it raises


def test_features_are_refused_where_the_model_takes_none_and_asked_for_where_it_does() -> None:
    spec = read_manifest(shared_bundle()).target.spec
    fed = pack(
        [RowInput([3, 4], 1, features=np.ones((2, 8), np.float32)), RowInput([], 0)], np.zeros(2, np.int64), 3, 64
    )
    assert fed.features is not None
    assert fed.features.shape == (2, 3, 8)
    assert fed.features.sum() == 16
    with pytest.raises(ContractError, match="features"):
        fed.validate(spec, 2, 128)
    fed.validate(msgspec.structs.replace(spec, features=8), 2, 128)
    bare = pack([RowInput([3, 4], 1)], np.zeros(1, np.int64), 1, 64)
    with pytest.raises(ContractError, match="features"):
        bare.validate(msgspec.structs.replace(spec, features=8), 2, 128)


def test_the_first_layers_of_a_tapped_graph_hand_out_nothing() -> None:
    model = models.random_model(models.FAMILIES["llama"]())
    spec = msgspec.structs.replace(model_spec(model.config, 101, "float32"), taps=("1", "final"))
    graph = add_taps(trace(model.config), spec)
    assert "hidden" in [value.name for value in graph.graph.outputs]
    assert "hidden" not in [value.name for value in first_layers(graph, 1).graph.outputs]


def test_a_graph_without_marks_cannot_be_tapped() -> None:
    spec = model_spec(models.FAMILIES["llama"](), 101, "float32")
    empty = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    for tap, said in (("1", "marks no such place"), ("final", "where positions are chosen")):
        with pytest.raises(ExportError, match=said):
            add_taps(empty, msgspec.structs.replace(spec, taps=(tap,)))

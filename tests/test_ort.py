"""The ONNX Runtime engine on a real graph: in place, by view, grown, refused."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specdec.engines.contract import Chunk, ModelSpec
from specdec.engines.errors import ContractError, EngineError, EngineUnavailableError, RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.ort import PROVIDERS, OrtEngine, open_session
from specdec.engines.registry import EngineConfig, backends, open_engine
from support.bundles import shared_bundle, tiny_bundle
from support.qdq import quantized
from support.scoring import chain


@pytest.fixture(scope="module")
def graph() -> tuple[Path, ModelSpec]:
    bundle = shared_bundle()
    target = read_manifest(bundle).target
    return bundle / target.variants["fp32"].graph, target.spec


@pytest.fixture(scope="module")
def engine(graph: tuple[Path, ModelSpec]) -> OrtEngine:
    return OrtEngine(*graph)


def tokens(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, shape)


def test_a_pass_writes_its_slots_in_place_and_nothing_else(engine: OrtEngine) -> None:
    kv = engine.allocate(3, 256)
    for array in kv._memory.host:
        array.fill(5.0)
    addresses = [kv.view(i, 0) for i in range(2 * engine.spec.num_layers)]
    engine.step(chain(tokens((2, 3)), [4, 9]), kv, first_row=1)
    assert [kv.view(i, 0) for i in range(2 * engine.spec.num_layers)] == addresses
    assert addresses == [array.ctypes.data for array in kv._memory.host]
    for array in kv._memory.host:
        written = (array != 5.0).all(axis=(1, 3))  # [rows, slots]
        assert [np.flatnonzero(row).tolist() for row in written] == [[], [4, 5, 6], [9, 10, 11]]


MEMORY_CHILD = """
import sys, numpy as np
from pathlib import Path
from specdec.engines.manifest import read_manifest
from specdec.engines.ort import PROVIDERS, OrtEngine
from support.scoring import chain

def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

bundle = Path(sys.argv[1])
target = read_manifest(bundle).target
engine = OrtEngine(bundle / target.variants["fp32"].graph, target.spec)
small = engine.allocate(1, 256)
tokens = np.ones((1, 4), np.int64)
engine.step(chain(tokens, [0]), small)
kv = engine.allocate(1, 40_000)
for array in kv._memory.host:
    array.fill(0.5)  # touch every page
Path("/proc/self/clear_refs").write_text("5")  # the peak starts over from here
before = peak_kib()
engine.step(chain(tokens, [9]), kv)
print(kv.nbytes // 1024, peak_kib() - before)
"""


def test_no_pass_copies_the_cache(tmp_path: Path) -> None:
    """Peak memory of a pass over a cache of hundreds of MiB grows by far less than one buffer."""
    bundle = tiny_bundle(tmp_path / "wide", head_dim=128, num_key_value_heads=4)  # what is allocated is the cache
    child = [sys.executable, "-c", MEMORY_CHILD, str(bundle)]
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PATH": ""}
    result = subprocess.run(child, env=environment, capture_output=True, text=True, check=True, timeout=120)
    cache, grown = map(int, result.stdout.split())
    assert cache >= 300_000
    buffers = 4  # key and value of two layers
    assert grown < cache / buffers / 4


def test_a_row_is_a_view(engine: OrtEngine) -> None:
    """The same tokens in row 2 of 3, and alone: the same bits."""
    line = tokens((1, 6))
    alone = engine.step(chain(line, [0]), engine.allocate(1, 256)).copy()
    kv = engine.allocate(3, 256)
    engine.step(chain(tokens((3, 6), 1), [0, 0, 0]), kv)
    assert np.array_equal(engine.step(chain(line, [0]), kv, first_row=2), alone)


def test_growth_keeps_what_is_committed(engine: OrtEngine) -> None:
    line = tokens((2, 12))
    whole = engine.step(chain(line, [0, 0]), engine.allocate(2, 256))[:, 8:].copy()
    kv = engine.allocate(2, 256)
    engine.step(chain(line[:, :8], [0, 0]), kv)
    kv.resize(4, 512, 8)
    assert (kv.rows, kv.capacity) == (4, 512)
    assert np.array_equal(engine.step(chain(line[:, 8:], [8, 8]), kv), whole)
    kv.resize(1, 128, 12)
    assert (kv.rows, kv.capacity) == (1, 128)
    again = engine.step(chain(line[:1, 8:], [8]), kv)
    assert np.array_equal(again, whole[:1])
    with pytest.raises(EngineError, match="12 slots in use do not fit into a cache of 8"):
        kv.resize(1, 8, 12)


def test_rows_are_given_back_without_a_copy(engine: OrtEngine) -> None:
    line = tokens((3, 12))
    whole = engine.step(chain(line, [0, 0, 0]), engine.allocate(3, 256))[:, 8:].copy()
    kv = engine.allocate(3, 256)
    engine.step(chain(line[:, :8], [0, 0, 0]), kv)
    arrays, content = list(kv._memory.host), kv.read(1, 256)
    kv.resize(2, 256, 0)
    assert (kv.rows, kv.capacity, kv.nbytes) == (2, 256, sum(array.nbytes for array in arrays))
    assert all(old is new for old, new in zip(arrays, kv._memory.host, strict=True))
    assert np.array_equal(kv.read(1, 256), content)
    assert np.array_equal(engine.step(chain(line[:2, 8:], [8, 8]), kv), whole[:2])
    kv.resize(3, 256, 12)
    assert not kv.read(2, 256).any(), "a row that comes back is new"


def test_a_moved_row_goes_on_where_it_was(engine: OrtEngine) -> None:
    line = tokens((2, 12))
    whole = engine.step(chain(line, [0, 0]), engine.allocate(2, 256))[:, 8:].copy()
    kv = engine.allocate(2, 256)
    engine.step(chain(line[:, :8], [0, 0]), kv)
    kv.move_row(1, 0, 8)
    assert np.array_equal(engine.step(chain(line[1:, 8:], [8]), kv), whole[1:])
    assert np.array_equal(kv.read(0, 8), kv.read(1, 8))


def test_a_row_can_be_cleared_and_no_other_is(engine: OrtEngine) -> None:
    kv = engine.allocate(3, 256)
    engine.step(chain(tokens((3, 8)), [0, 200, 9]), kv)
    before = [kv.read(row, 256) for row in range(3)]
    kv.clear(1)
    assert before[1][:, :, 200:208].all()
    assert not kv.read(1, 256).any()
    assert np.array_equal(kv.read(0, 256), before[0])
    assert np.array_equal(kv.read(2, 256), before[2])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_is_read_can_be_written_to_any_row_of_any_buffers(engine: OrtEngine, device: str) -> None:
    line = tokens((2, 12))
    whole = engine.step(chain(line, [0, 0]), engine.allocate(2, 256))[:, 8:].copy()
    source, kv = engine.allocate(2, 256), engine.allocate(3, 128)
    owners = kv._memory.host
    if device == "gpu":  # buffers that only copies of can be had, as on a GPU
        kv._memory.host = []
    engine.step(chain(line, [0, 0]), source)
    engine.step(chain(tokens((3, 20), 1), [0, 0, 0]), kv)
    before = [kv.read(row, 128) for row in range(3)]
    saved = source.read(1, 12)
    kv.write(2, saved[:, :, :8])
    assert all(array.flags.owndata for array in owners)
    assert np.array_equal(kv.read(2, 8), saved[:, :, :8])
    assert np.array_equal(kv.read(2, 128)[:, :, 8:], before[2][:, :, 8:]), "slots behind stay"
    assert all(np.array_equal(kv.read(row, 128), before[row]) for row in range(2)), "other rows stay"
    assert np.array_equal(engine.step(chain(line[1:, 8:], [8]), kv, first_row=2), whole[1:])
    kv.first_layers(1).write(0, saved[:2])
    assert np.array_equal(kv.read(0, 12)[:2], saved[:2])
    assert np.array_equal(kv.read(0, 12)[2:], before[0][2:, :, :12]), "layers that it does not have stay"


def test_slots_of_another_cache_are_refused(engine: OrtEngine) -> None:
    kv = engine.allocate(1, 128)
    saved = kv.read(0, 12)
    for other in (saved[:2], saved[:, :1], saved[..., :1], saved[0], saved.astype(np.float16), kv.read(0, 128)):
        wrong = np.concatenate([other, other], 2) if other.shape[-2] == 128 else other
        with pytest.raises(ContractError, match=r"slots \[.*\] of float\d+ do not fit into a row \[.*\] of float32"):
            kv.write(0, wrong)


def test_nbytes_is_what_the_contract_computes(engine: OrtEngine) -> None:
    kv = engine.allocate(2, 256)
    assert kv.nbytes == engine.spec.kv_bytes(2, 256) == sum(array.nbytes for array in kv._memory.host)


def bad(**changes: object) -> Chunk:
    good = chain(np.ones((1, 3), np.int64), [0])
    return Chunk(**{name: changes.get(name, getattr(good, name)) for name in Chunk.__slots__})


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (bad(past_lens=np.array([254])), "3 tokens after 254 does not fit 256 slots"),
        (bad(past_lens=np.array([-1])), "does not fit"),
        (bad(input_ids=np.array([[1, 2, 336]])), "token id 336 is outside the model's 336"),
        (bad(position_ids=np.array([[0, 1, 1024]])), "position 1024 is outside the model's 1024"),
        (bad(chunk_mask=np.ones((1, 2, 2), bool)), "chunk shapes disagree"),
        (bad(logit_indices=np.array([[3]])), "logit index 3 is outside the chunk of 3"),
        (chain(np.ones((2, 3), np.int64), [0, 0]), "chunk of 2 rows on a cache of 1"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(engine: OrtEngine, chunk: Chunk, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        engine.step(chunk, engine.allocate(1, 256))


def test_a_closed_engine_says_so(graph: tuple[Path, ModelSpec]) -> None:
    engine = open_engine(*graph)
    kv = engine.allocate(1, 256)
    engine.close()
    engine.close()
    for call in (lambda: engine.step(chain(np.ones((1, 2), np.int64), [0]), kv), lambda: engine.allocate(1, 256)):
        with pytest.raises(EngineError, match="the engine is closed"):
            call()


def test_a_provider_that_is_not_there_is_an_error_not_a_fallback(graph: tuple[Path, ModelSpec]) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(EngineUnavailableError, match=r'no CUDAExecutionProvider: pip install "specdec\[gpu\]"'):
        open_engine(*graph, EngineConfig(provider="cuda"))


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_a_provider_that_was_not_taken_is_an_error(
    graph: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """onnxruntime-gpu without a working driver lists CUDA and then runs on the CPU without a word."""
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(PROVIDERS.values()))
    message = f"{PROVIDERS[provider]} was asked for and ONNX Runtime took CPU"
    with pytest.raises(EngineUnavailableError, match=message):
        open_engine(*graph, EngineConfig(provider=provider))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(backend="tensorflow"), f"unknown backend 'tensorflow': choose one of {', '.join(backends())}"),
        (EngineConfig(provider="tpu"), "unknown provider 'tpu': choose one of cpu, cuda, tensorrt, tensorrt-rtx"),
    ],
)
def test_unknown_names_list_the_known_ones(graph: tuple[Path, ModelSpec], config: EngineConfig, message: str) -> None:
    with pytest.raises(EngineUnavailableError, match=message):
        open_engine(*graph, config)


def test_threads_stop_spinning_before_another_session_needs_the_cores(graph: tuple[Path, ModelSpec]) -> None:
    options = open_session(graph[0], "cpu", 2).get_session_options()
    assert int(options.get_session_config_entry("session.intra_op.spin_duration_us")) <= 500


def test_threads_are_counted_from_one() -> None:
    with pytest.raises(RequestError, match="threads must be at least 1, not 0"):
        EngineConfig(threads=0)


def test_growth_that_does_not_fit_leaves_the_buffers(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = engine.allocate(2, 256)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", full)
        with pytest.raises(EngineError, match=r"a cache of 4 rows x 512 slots needs \d+ MiB more"):
            kv.resize(4, 512, 8)
    assert (kv.rows, kv.capacity) == (2, 256)
    engine.step(chain(tokens((2, 4)), [0, 0]), kv)


def test_a_missing_and_a_broken_graph(graph: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is missing"):
        open_engine(tmp_path / "model.onnx", graph[1])
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match="cannot load"):
        open_engine(tmp_path / "model.onnx", graph[1])


def test_a_graph_that_is_not_the_manifests_model_is_refused(graph: tuple[Path, ModelSpec]) -> None:
    import msgspec

    path, spec = graph
    with pytest.raises(ContractError, match="does not keep the engine contract: past_key_values"):
        open_engine(path, msgspec.structs.replace(spec, num_layers=spec.num_layers + 1))
    with pytest.raises(ContractError, match=r"past_key_values.0.key is tensor\(float\)"):
        open_engine(path, msgspec.structs.replace(spec, head_dim=spec.head_dim + 1))


def test_buffers_of_another_engine_are_refused(engine: OrtEngine) -> None:
    with pytest.raises(ContractError, match="takes the buffers that it allocates, not object"):
        engine.step(chain(np.ones((1, 2), np.int64), [0]), object())


def test_rounding_is_computed_as_written(graph: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    """Fused Q/DQ pairs saturate on AVX2: what a TensorRT engine is compared with must not be fused."""
    import onnxruntime

    path = quantized(graph[0], tmp_path / "model.onnx", ir.DataType.INT8, activations=True)
    engine = OrtEngine(path, graph[1], threads=1)
    chunk = chain(tokens((1, 16)), [0])
    found = engine.step(chunk, engine.allocate(1, 128))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3  # the cache is copied here, which it warns of
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    cache = np.zeros((1, graph[1].num_kv_heads, 128, graph[1].head_dim), np.float32)
    feeds = {value.name: getattr(chunk, value.name, cache) for value in session.get_inputs()}
    expected = session.run(["logits"], feeds)[0]
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_float8_rounding_around_float32_products_loads(graph: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    path = quantized(graph[0], tmp_path / "model.onnx", ir.DataType.FLOAT8E4M3FN, activations=True)
    engine = OrtEngine(path, graph[1])
    assert np.isfinite(engine.step(chain(tokens((1, 4)), [0]), engine.allocate(1, 128))).all()


def test_bfloat16_is_refused(graph: tuple[Path, ModelSpec]) -> None:
    import msgspec

    with pytest.raises(
        EngineError, match=r"no bfloat16 kernels on the CPU.*: use precision fp32 or fp16, or backend ten"
    ):
        open_engine(graph[0], msgspec.structs.replace(graph[1], dtype="bfloat16"))


def test_logits_of_another_size_are_refused(graph: tuple[Path, ModelSpec]) -> None:
    import msgspec

    spec = msgspec.structs.replace(graph[1], logits_size=graph[1].logits_size + 1)
    with pytest.raises(ContractError, match=r"logits is tensor\(float\) .*, the manifest says float32, 337 wide"):
        open_engine(graph[0], spec)


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu_in_place_and_ragged(graph: tuple[Path, ModelSpec], engine: OrtEngine) -> None:
    cuda = open_engine(*graph, EngineConfig(provider="cuda"))
    line = tokens((2, 12))
    results = []
    for each in (engine, cuda):
        kv = each.allocate(2, 256)
        each.step(chain(line[:, :6], [0, 0]), kv)
        kv.resize(3, 512, 6)
        kv.move_row(1, 2, 6)
        results.append(each.step(chain(line[:, 6:], [6, 6]), kv).copy())
    assert np.abs(results[0] - results[1]).max() < 1e-3
    kv.write(0, saved := kv.read(1, 12))
    assert np.array_equal(kv.read(0, 12), saved)

"""The TensorRT engine: all that is its own on a host that plays the GPU, the rest on a GPU where there is one.

The fake (support/fake_tensorrt) executes the real graph on the memory that the engine manages, so the logits have to be
ONNX Runtime's, bit for bit. What it cannot show is what the marker `gpu` is for.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from specdec.engines import cuda as cuda_module
from specdec.engines import nvidia, trt, trt_library
from specdec.engines.base import Engine, KVBuffers
from specdec.engines.contract import CHUNK_INPUTS, ModelSpec, past_names
from specdec.engines.cuda import Cuda, load_cuda
from specdec.engines.errors import ContractError, EngineError, EngineUnavailableError
from specdec.engines.invariance import run_invariance
from specdec.engines.manifest import Limits, Plan, Variant, read_manifest
from specdec.engines.nvidia import Device, Nvidia
from specdec.engines.plan import choose_plan, choose_profile, plan_sizes, profiles
from specdec.engines.registry import EngineConfig, open_engine, with_plans
from specdec.engines.trt import TrtEngine
from specdec.engines.trt_cache import TrtKV
from support.bundles import TOKENIZER_SIZE, shared_bundle
from support.engines import TOKENS, open_tiny
from support.fake_tensorrt import FakeContext, FakeCuda, FakeEngine, FakeTensorRT, TensorLocation
from support.scoring import chain, tree

LIMITS = Limits(max_batch=4, max_length=480, max_tree=64)
GATE_LIMITS = Limits(max_batch=4, max_length=900, max_tree=64)  # the gate scores behind 300 tokens, in 900 slots
L4 = Nvidia(devices=(Device("NVIDIA L4", "8.9", 24 * 10**9),))


def plan_for(spec: ModelSpec, limits: Limits = LIMITS, **changes: Any) -> Plan:
    inputs = dict.fromkeys(CHUNK_INPUTS, "int64") | {"chunk_mask": "bool"}
    fields = {
        "backend": "tensorrt-rtx",
        "library": FakeTensorRT.__version__,
        "architectures": ["sm89"],
        "file": "target/fp32/tensorrt-rtx-sm89.plan",
        "inputs": inputs | dict.fromkeys(past_names(spec.num_layers), spec.dtype),
        **plan_sizes(limits),
    }
    return Plan(**fields | changes)


@pytest.fixture(scope="module")
def oracle() -> Engine:
    return open_tiny()


@pytest.fixture(scope="module")
def graph() -> Path:
    return shared_bundle() / read_manifest(shared_bundle()).target.variants["fp32"].graph


class Made:
    """An engine on the fake, and the fake."""

    def __init__(
        self,
        folder: Path,
        graph: Path,
        spec: ModelSpec,
        kind: type[FakeEngine] = FakeEngine,
        limits: Limits = LIMITS,
    ) -> None:
        path = folder / "tensorrt-rtx-sm89.plan"
        path.write_text(str(graph))
        self.cuda, self.plan = FakeCuda(), plan_for(spec, limits)
        self.library = FakeTensorRT(spec, self.plan, self.cuda)
        self.library.engine_type = kind
        self.engine = TrtEngine(path, self.plan, spec, self.library, Cuda(self.cuda), "fake")

    @property
    def contexts(self) -> list[Any]:
        return self.library.engines[0].contexts


@pytest.fixture
def made(tmp_path: Path, graph: Path, oracle: Engine) -> Made:
    return Made(tmp_path, graph, oracle.spec)


def tokens(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TOKENIZER_SIZE, shape)


def test_it_keeps_the_protocols(made: Made) -> None:
    engine: Engine = made.engine
    kv: KVBuffers = engine.allocate(2, 128)
    assert (kv.rows, kv.capacity, kv.nbytes) == (2, 640, engine.spec.kv_bytes(2, 640))
    assert not kv.read(1, 640).any()  # the fake's memory is not zero by itself
    assert not engine.capabilities.growable
    assert engine.capabilities.device == "tensorrt-rtx 1.7.1.116, fake"


def test_prefill_verify_tree_and_views_give_the_oracles_bits(made: Made, oracle: Engine) -> None:
    found, expected = made.engine.allocate(3, 640), oracle.allocate(3, 640)
    prompt, batch = tokens((1, 200)), tokens((2, 5), 1)
    steps = (
        (chain(prompt, [0], np.array([[199]])), 2),  # one row, wide
        (chain(tokens((1, 7), 2), [0]), 0),
        (chain(batch, [200 - 3, 200]), 1),
        (chain(tokens((3, 4), 3), [7, 9, 205]), 0),
        (tree(tokens((2, 6), 4), [11, 13], [-1, 0, 0, 1, 2, 2]), 0),
    )
    for chunk, first_row in steps:
        logits = made.engine.step(chunk, found, first_row)
        assert logits.dtype == np.float32
        assert np.array_equal(logits, oracle.step(chunk, expected, first_row))
    for row in range(3):
        assert np.array_equal(found.read(row, 640), expected.read(row, 640))
    assert [context.runs for context in made.contexts] == [4, 1]
    assert [context.profile for context in made.contexts] == [0, 1]


def test_logits_of_other_buffers_stay(made: Made) -> None:
    one, other = made.engine.allocate(1, 640), made.engine.allocate(1, 640)
    first = made.engine.step(chain(tokens((1, 4)), [0]), one)
    kept = first.copy()
    made.engine.step(chain(tokens((1, 4), 5), [0]), other)
    assert np.array_equal(first, kept)


def test_rows_are_added_moved_and_compacted(made: Made, oracle: Engine) -> None:
    found, expected = made.engine.allocate(2, 640), oracle.allocate(2, 640)
    for kv, engine in ((found, made.engine), (expected, oracle)):
        engine.step(chain(tokens((2, 9)), [0, 3]), kv)
        kv.resize(4, 640, 12)
        kv.move_row(1, 3, 12)
        kv.move_row(0, 0, 9)
        kv.move_slots(3, np.array([6, 7, 10, 11]), 5)  # a run that overlaps its target, and a gap
        engine.step(chain(tokens((4, 3), 1), [9, 12, 0, 9]), kv)
        kv.clear(2)
    assert found.rows == 4
    for row in range(4):
        assert np.array_equal(found.read(row, 15), expected.read(row, 15))
        assert found.read(row, 640).any() == (row != 2)
    with pytest.raises(EngineError, match="a cache of 4 rows cannot shrink to 3"):
        found.resize(3, 640, 1)


def test_the_invariance_gate_runs_on_it(tmp_path: Path, graph: Path, oracle: Engine) -> None:
    """Every pass that the gate makes fits the profiles of ordinary limits."""

    def opener(threads: int) -> Engine:
        return Made(tmp_path, graph, oracle.spec, limits=GATE_LIMITS).engine

    assert run_invariance(opener, TOKENS, lambda _: None)[1].exact


def test_what_does_not_fit_is_refused(made: Made) -> None:
    engine = made.engine
    for rows, capacity in ((5, 640), (1, 641)):
        with pytest.raises(EngineError, match=rf"{rows} rows x {capacity} slots is more than this engine's 4 x 640"):
            engine.allocate(rows, capacity)
    kv = engine.allocate(2, 640)
    with pytest.raises(EngineError, match="5 rows x 640 slots is more than"):
        kv.resize(5, 640, 0)
    message = (
        r"2 x 65 tokens with 1 logits fits no profile of this engine: verify 4 x 64 \(logits at 64\), prefill 1 x 5"
    )
    with pytest.raises(ContractError, match=message):
        engine.step(chain(tokens((2, 65)), [0, 0], np.array([[0], [0]])), kv)
    with pytest.raises(ContractError, match="3 tokens after 638 does not fit 640 slots"):
        engine.step(chain(tokens((1, 3)), [638]), kv)
    with pytest.raises(ContractError, match="takes the buffers that it allocates, not object"):
        engine.step(chain(tokens((1, 3)), [0]), object())  # type: ignore[arg-type]
    made.cuda.limit = 1000
    with pytest.raises(EngineError, match="cudaMalloc failed: out of memory"):
        kv.resize(4, 640, 0)
    assert kv.rows == 2


def test_a_failing_pass_gives_the_librarys_reason(made: Made) -> None:
    kv = made.engine.allocate(1, 640)
    made.contexts[0].fails = True
    with pytest.raises(EngineError, match=r"on a chunk of 1 x 3 tokens: Cuda Runtime \(an illegal memory access\)$"):
        made.engine.step(chain(tokens((1, 3)), [0]), kv)


def test_a_closed_engine_says_so_and_memory_is_given_back(made: Made) -> None:
    kv = made.engine.allocate(1, 640)
    logits = made.engine.step(chain(tokens((1, 2)), [0]), kv)
    made.engine.close()
    made.engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        made.engine.step(chain(tokens((1, 2)), [0]), kv)
    with pytest.raises(EngineError, match="the engine is closed"):
        made.engine.allocate(1, 640)
    assert len(made.cuda.blocks) == 2  # the cache, and the logits that are still in use
    del kv
    assert len(made.cuda.blocks) == 1
    del logits
    assert not made.cuda.blocks


class OtherNames(FakeEngine):
    def get_tensor_name(self, index: int) -> str:
        return super().get_tensor_name(index).replace("present.1.key", "present.9.key")


class OtherType(FakeEngine):
    def get_tensor_dtype(self, name: str) -> str:
        return "DataType.HALF" if name == "logits" else super().get_tensor_dtype(name)


class OnHost(FakeEngine):
    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name == "past_lens" else TensorLocation.DEVICE


class OtherCapacity(FakeEngine):
    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(512 if size == 640 else size for size in super().get_tensor_shape(name))


class Copying(FakeEngine):
    def get_aliased_input_tensor(self, name: str) -> str | None:
        return None if name == "present.1.value" else super().get_aliased_input_tensor(name)


class OtherProfile(FakeEngine):
    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return super().get_tensor_profile_shape(name, 1 - index)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OtherNames, "does not keep the engine contract: present.1.key, present.9.key"),
        (OtherType, "logits of the plan is float16, its record says float32"),
        (OnHost, "past_lens of the plan lies in host memory"),
        (
            OtherCapacity,
            r"past_key_values.0.key of the plan is \(-1, 2, 512, 16\), the manifest says \(-1, 2, 640, 16\)",
        ),
        (Copying, "present.1.value of the plan is not written in place of past_key_values.1.value"),
        (OtherProfile, r"input_ids of the plan goes to \(1, 512\) in profile verify 4 x 64 .*, not \(4, 64\)"),
    ],
)
def test_a_plan_that_is_not_its_record_is_refused(
    tmp_path: Path, graph: Path, oracle: Engine, kind: type[FakeEngine], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        Made(tmp_path, graph, oracle.spec, kind)


def test_a_plan_that_does_not_load(tmp_path: Path, oracle: Engine) -> None:
    with pytest.raises(EngineError, match=r"cannot load .*plan: Serialization \(magic tag differs.\); export"):
        Made(tmp_path, Path("damaged"), oracle.spec)
    with pytest.raises(EngineError, match="is missing"):
        TrtEngine(tmp_path / "no.plan", plan_for(oracle.spec), oracle.spec, None, Cuda(FakeCuda()), "fake")


@pytest.mark.parametrize(("dtype", "seen"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "uint16")])
def test_what_is_read_can_be_written_bit_for_bit(oracle: Engine, dtype: str, seen: str) -> None:
    """NaNs as well; bfloat16, which numpy lacks, comes as its bits."""
    spec = msgspec.structs.replace(oracle.spec, dtype=dtype)
    fake = FakeCuda()
    kv = TrtKV(Cuda(fake), spec, plan_for(spec), 3)
    (block,) = fake.blocks.values()
    assert kv.nbytes == len(block)
    block[:] = np.random.default_rng(0).integers(0, 256, len(block))
    before = [kv.read(row, kv.capacity).tobytes() for row in range(3)]
    saved = kv.read(1, 30)
    assert saved.dtype == seen
    kv.write(2, saved[:, :, :20])
    assert kv.read(2, 20).tobytes() == saved[:, :, :20].tobytes()
    assert kv.read(2, kv.capacity)[:, :, 20:].tobytes() == np.frombuffer(before[2], seen).reshape(
        *saved.shape[:2], -1, saved.shape[3]
    )[:, :, 20:].tobytes(), "slots behind stay"  # fmt: skip
    assert [kv.read(row, kv.capacity).tobytes() for row in range(2)] == before[:2], "other rows stay"
    for other in (saved[:2], saved.view("i1"), np.concatenate([saved] * 30, 2)):
        with pytest.raises(ContractError, match="do not fit into a row"):
            kv.write(0, other)


def test_a_row_goes_on_from_what_another_buffer_held(made: Made) -> None:
    line, source, kv = tokens((1, 12)), made.engine.allocate(1, 640), made.engine.allocate(3, 640)
    whole = made.engine.step(chain(line, [0]), source)[:, 8:].copy()
    kv.write(2, source.read(0, 8))
    assert np.array_equal(made.engine.step(chain(line[:, 8:], [8]), kv, 2), whole)


# Which plan, and what has to be here for it.


def test_the_driver_is_asked_before_anything_is_loaded(
    graph: Path, oracle: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a driver, giving a plan to the real library would end this process."""
    monkeypatch.setattr(trt, "load_library", lambda backend: pytest.fail("the library was loaded"))
    monkeypatch.setattr(nvidia, "probe", lambda: Nvidia(problem="no NVIDIA driver (libcuda.so.1)"))
    config = EngineConfig(backend="tensorrt-rtx", plans={tmp_path / "tensorrt-rtx-sm89.plan": plan_for(oracle.spec)})
    with pytest.raises(EngineUnavailableError, match=r"tensorrt-rtx needs an NVIDIA GPU: no NVIDIA driver \(libcuda"):
        open_engine(graph, oracle.spec, config)


def test_a_bundle_without_a_plan_for_this_gpu(
    graph: Path, oracle: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(EngineUnavailableError, match="holds no tensorrt-rtx plan: export with --backend tensorrt-rtx"):
        open_engine(graph, oracle.spec, EngineConfig(backend="tensorrt-rtx"))
    monkeypatch.setattr(nvidia, "probe", lambda: Nvidia(devices=(Device("RTX 5090", "12.0", 1),)))
    config = EngineConfig(backend="tensorrt-rtx", plans={tmp_path / "tensorrt-rtx-sm89.plan": plan_for(oracle.spec)})
    message = "no tensorrt-rtx plan for sm120, which this GPU is: it holds tensorrt-rtx-sm89; export it with --backend"
    with pytest.raises(EngineUnavailableError, match=message):
        open_engine(graph, oracle.spec, config)


def test_a_plan_of_another_version(
    graph: Path, oracle: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvidia, "probe", lambda: L4)
    monkeypatch.setattr(trt, "load_library", lambda backend: FakeTensorRT)
    plan = plan_for(oracle.spec, library="1.6.0")
    config = EngineConfig(backend="tensorrt-rtx", plans={tmp_path / "tensorrt-rtx-sm89.plan": plan})
    message = (
        r'by tensorrt-rtx 1.6.0 and runs on no other version, here is 1.7.1.116: pip install "tensorrt-rtx==1.6.0"'
    )
    with pytest.raises(EngineUnavailableError, match=message):
        open_engine(graph, oracle.spec, config)


def test_the_registry_opens_the_plan_of_a_variant(
    graph: Path, oracle: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, plan = FakeCuda(), plan_for(oracle.spec, file="tensorrt-rtx-sm89.plan")
    (tmp_path / plan.file).write_text(str(graph))
    monkeypatch.setattr(nvidia, "probe", lambda: L4)
    monkeypatch.setattr(trt, "load_library", lambda backend: FakeTensorRT(oracle.spec, plan, fake))
    monkeypatch.setattr(trt, "load_cuda", lambda: fake)
    variant = read_manifest(shared_bundle()).target.variants["fp32"]
    variant = msgspec.structs.replace(variant, plans={"tensorrt-rtx-sm89": plan})
    engine = open_engine(graph, oracle.spec, with_plans(EngineConfig(backend="tensorrt-rtx"), tmp_path, variant))
    assert engine.capabilities.device == "tensorrt-rtx 1.7.1.116, NVIDIA L4"
    chunk = chain(tokens((1, 3)), [0])
    assert np.array_equal(engine.step(chunk, engine.allocate(1, 9)), oracle.step(chunk, oracle.allocate(1, 640)))


def test_the_plan_for_the_fewest_architectures_is_taken(oracle: Engine) -> None:
    one, both = plan_for(oracle.spec), plan_for(oracle.spec, architectures=["sm89", "sm120"])
    other = plan_for(oracle.spec, backend="tensorrt")
    known = {"tensorrt-sm89": other, "tensorrt-rtx-sm89-sm120": both, "tensorrt-rtx-sm89": one}
    assert choose_plan(known, "tensorrt-rtx", "sm89") is one
    assert choose_plan(known, "tensorrt-rtx", "sm120") is both
    assert choose_plan(known, "tensorrt", "sm89") is other


@pytest.mark.parametrize(
    ("chunk", "index"), [((1, 1, 1), 0), ((4, 64, 64), 0), ((1, 65, 1), 1), ((1, 512, 64), 1), ((1, 64, 1), 0)]
)
def test_the_profile_of_a_pass(oracle: Engine, chunk: tuple[int, int, int], index: int) -> None:
    assert choose_profile(plan_for(oracle.spec), *chunk) == index


@pytest.mark.parametrize("chunk", [(5, 1, 1), (2, 65, 1), (1, 513, 1), (1, 200, 65)])
def test_a_pass_outside_every_profile(oracle: Engine, chunk: tuple[int, int, int]) -> None:
    with pytest.raises(ContractError, match="fits no profile"):
        choose_profile(plan_for(oracle.spec), *chunk)


def test_usual_sizes_lie_inside_their_profiles(oracle: Engine) -> None:
    for limits in (
        LIMITS,
        Limits(max_batch=1, max_length=100, max_tree=1),
        Limits(max_batch=9, max_length=9, max_tree=200),
    ):
        for profile in profiles(plan_for(oracle.spec, limits)):
            assert profile.takes(*profile.usual)


def test_architectures_are_named_after_the_compute_capability() -> None:
    assert [Device("", capability, 0).architecture for capability in ("8.9", "12.0")] == ["sm89", "sm120"]


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(cuda_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailableError, match=r'cuda-bindings is not installed: pip install "specdec\[rtx\]"'):
        load_cuda()
    with pytest.raises(EngineUnavailableError, match=r'tensorrt-rtx is not installed: pip install "specdec\[rtx\]"'):
        trt_library.load_library("tensorrt-rtx")


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libnvinfer.so.10:\n cannot open shared object file")

    monkeypatch.setattr(trt_library.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(trt_library.importlib, "import_module", broken)
    for load in (load_cuda, lambda: trt_library.load_library("tensorrt")):
        with pytest.raises(EngineUnavailableError, match=r"does not load: libnvinfer.so.10: cannot open .*; try pip"):
            load()


def test_the_fake_has_the_names_of_the_real_library() -> None:
    """A call that the library does not know would pass on the fake."""
    real = pytest.importorskip("tensorrt_rtx", reason="the real library")
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings")
    own = {"aliases", "contexts", "names", "session", "library", "logger", "blocks", "limit", "check"}
    for fake, known in ((FakeEngine, real.ICudaEngine), (FakeContext, real.IExecutionContext), (FakeCuda, bindings)):
        assert {name for name in vars(fake) if not name.startswith("_")} - own <= set(dir(known))
    assert hasattr(real.ExecutionContextAllocationStrategy, "ON_PROFILE_CHANGE")
    assert {"ERROR", "INTERNAL_ERROR", "WARNING"} <= set(dir(real.ILogger.Severity))
    assert {"DEVICE", "HOST"} <= set(dir(real.TensorLocation))
    assert set(trt_library.DTYPES) <= set(dir(real.DataType))
    assert hasattr(real.Runtime, "deserialize_cuda_engine")


def test_the_real_bindings_say_why_they_cannot() -> None:
    """`cuda-bindings` without a driver: the same calls, real error codes."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings")
    if nvidia.probe().devices:
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match=r"cudaStreamCreateWithFlags failed: .*driver"):
        Cuda(load_cuda())


# On a GPU: what nobody here has run.


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Engine, Engine]]:
    """The tiny bundle's fp32 graph as a plan for the GPU that is here, and on ONNX Runtime's CPU provider."""

    def open_both(backend: str) -> tuple[Engine, Engine]:
        pytest.importorskip({"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}[backend])
        from specdec.export.tensorrt import build_plans

        bundle = Path(shutil.copytree(shared_bundle(), tmp_path_factory.mktemp("gpu") / "bundle"))
        target = read_manifest(bundle).target
        variant: Variant = target.variants["fp32"]
        architecture = nvidia.probe().devices[0].architecture
        (built,) = build_plans(bundle, variant.graph, target.spec, GATE_LIMITS, backend, [architecture])  # type: ignore[arg-type]
        variant = msgspec.structs.replace(variant, plans={built.key: built.plan})
        config = with_plans(EngineConfig(backend=backend), bundle, variant)
        return open_engine(bundle / variant.graph, target.spec, config), open_tiny()

    return open_both


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_gpu_agrees_with_onnx_runtime_on_the_cpu(gpu: Callable[[str], tuple[Engine, Engine]], backend: str) -> None:
    engine, oracle = gpu(backend)
    results = []
    for each in (engine, oracle):
        kv = each.allocate(2, 1024)
        found = [each.step(chain(tokens((1, 200)), [0], np.array([[199]])), kv, 1).copy()]
        found.append(each.step(chain(tokens((2, 5), 1), [0, 200]), kv).copy())
        found.append(each.step(tree(tokens((2, 4), 2), [5, 205], [-1, 0, 0, 2]), kv).copy())
        kv.move_slots(1, np.array([205, 207, 208]), 205)
        kv.resize(3, 1024, 208)
        kv.move_row(1, 2, 208)
        found.append(each.step(chain(tokens((3, 3), 3), [5, 208, 208]), kv).copy())
        found.append(kv.read(2, 211))
        results.append(found)
    for ours, theirs in zip(*results, strict=True):
        assert np.abs(ours - theirs).max() < 2e-2 * max(1.0, np.abs(theirs).max())  # TF32 products on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_gpu_passes_the_invariance_gate(gpu: Callable[[str], tuple[Engine, Engine]], backend: str) -> None:
    """What `exact` asks of an engine. A failure here is a finding about its kernels: see docs/engines.md."""
    run_invariance(lambda threads: gpu(backend)[0], TOKENS, lambda _: None)

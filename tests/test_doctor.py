"""What the doctor concludes from made-up facts, how probes report crashes, and the command itself."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdec.engines import nvidia
from specdec.engines.nvidia import Device, Nvidia
from specdec.tools import doctor, probes
from specdec.tools.probes import Cpu, Facts, Memory, OnnxRuntime

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
NO_DRIVER = Nvidia(problem="no NVIDIA driver (libcuda.so.1: not found)")
L4 = Nvidia(driver="550.54.15", cuda="12.4", devices=(Device("NVIDIA L4", "8.9", 24_000_000_000),))
H200 = Nvidia(driver="570.1", cuda="12.8", devices=(Device("NVIDIA H200", "9.0", 150_000_000_000),))
ORT_CPU = OnnxRuntime("1.32.0", (CPU,), (CPU,))
ORT_CUDA = OnnxRuntime("1.32.0", (CUDA, CPU), (CPU, CUDA))
ORT_ABSENT = OnnxRuntime(problem="not installed")
LEAN = ("specdec", "numpy", "msgspec", "tokenizers", "jinja2")
ALL_BACKENDS = ("ort", "tensorrt", "tensorrt-rtx")


def facts(
    *installed: str, ort: OnnxRuntime = ORT_ABSENT, nvidia: Nvidia = NO_DRIVER, backends: tuple[str, ...] = ("ort",)
) -> Facts:
    """Facts of a machine with the lean packages and `installed`."""
    present = {*LEAN, *installed}
    return Facts(
        python="3.11.9",
        platform="Linux-x86_64",
        packages={name: "1.0" if name in present else None for name in probes.PACKAGES},
        backends=backends,
        onnxruntime=ort,
        nvidia=nvidia,
        cpu=Cpu("A processor", 2, ("avx2",)),
        memory=Memory(16_000_000_000, None),
    )


def verdict(of: Facts, name: str) -> tuple[bool, str, str | None]:
    report = doctor.diagnose(of)
    found = next(one for one in report.run + report.build if one.name == name)
    return found.ok, found.detail, found.fix


def test_no_engine_names_the_extra_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "gather", lambda: facts())
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "no   ONNX Runtime on the CPU   ONNX Runtime is not installed\n" in out
    assert '-> pip install "specdec[cpu]"\n' in out
    assert not any(line.startswith("  yes") for line in out.splitlines())


def test_a_cpu_runtime_is_enough_to_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probes, "gather", lambda: facts("onnxruntime", ort=ORT_CPU))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "yes  ONNX Runtime on the CPU   onnxruntime 1.32.0\n" in out
    assert "missing: torch, transformers, onnx, onnxscript, onnx-ir, gguf" in out
    assert '-> pip install "specdec[export]"\n' in out
    assert "memory     16.0 GB, unknown available\n" in out


def test_a_broken_cpu_runtime_is_not_reported_as_working() -> None:
    broken = OnnxRuntime(problem="the library crashed: Illegal instruction")
    ok, detail, fix = verdict(facts("onnxruntime", ort=broken), "ONNX Runtime on the CPU")
    assert not ok
    assert detail == "onnxruntime is installed and does not work: the library crashed: Illegal instruction"
    assert fix == "pip install --force-reinstall onnxruntime"


def test_cuda_that_works() -> None:
    ok, detail, fix = verdict(facts("onnxruntime-gpu", ort=ORT_CUDA, nvidia=L4), "ONNX Runtime on CUDA")
    assert (ok, detail, fix) == (True, "onnxruntime-gpu 1.32.0 on NVIDIA L4 (8.9)", None)


def test_the_silent_fallback_is_found_out() -> None:
    fallen = OnnxRuntime("1.32.0", available=(CUDA, CPU), working=(CPU,))
    here = facts("onnxruntime-gpu", ort=fallen, nvidia=L4)
    ok, detail, fix = verdict(here, "ONNX Runtime on CUDA")
    assert not ok
    assert "falls back to the CPU" in detail
    assert fix == 'pip install "onnxruntime-gpu[cuda,cudnn]"'
    assert verdict(here, "ONNX Runtime on the CPU")[0]
    assert any("without an error" in note for note in doctor.diagnose(here).notes)


def test_a_gpu_with_the_cpu_package_only() -> None:
    ok, detail, fix = verdict(facts("onnxruntime", ort=ORT_CPU, nvidia=L4), "ONNX Runtime on CUDA")
    assert (ok, detail) == (False, "onnxruntime-gpu is not installed")
    assert fix == 'pip uninstall -y onnxruntime && pip install "specdec[gpu]"'


def test_both_onnxruntime_packages() -> None:
    here = facts("onnxruntime", "onnxruntime-gpu", ort=ORT_CPU, nvidia=L4)
    ok, detail, fix = verdict(here, "ONNX Runtime on CUDA")
    assert not ok
    assert "has no CUDA provider: another onnxruntime package lies over onnxruntime-gpu" in detail
    assert fix == 'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "specdec[gpu]"'
    assert any("overwrite each other" in note for note in doctor.diagnose(here).notes)


def test_no_driver() -> None:
    ok, detail, fix = verdict(facts("onnxruntime-gpu", ort=ORT_CPU), "ONNX Runtime on CUDA")
    assert (ok, detail) == (False, "no NVIDIA driver (libcuda.so.1: not found)")
    assert fix == 'with an NVIDIA GPU: install its driver, then pip install "specdec[gpu]"'


def test_building_needs_the_whole_export_extra() -> None:
    assert verdict(facts(*doctor.EXPORT_PACKAGES), "bundles for ONNX Runtime")[0]
    without = [name for name in doctor.EXPORT_PACKAGES if name != "onnx-ir"]
    assert verdict(facts(*without), "bundles for ONNX Runtime") == (
        False,
        "missing: onnx-ir",
        'pip install "specdec[export]"',
    )
    with_gpu = ["onnxruntime-gpu" if name == "onnxruntime" else name for name in doctor.EXPORT_PACKAGES]
    assert verdict(facts(*with_gpu), "bundles for ONNX Runtime")[0], "onnxruntime-gpu serves as onnxruntime"


def test_tensorrt_rtx_compiles_without_a_gpu_and_runs_with_one() -> None:
    installed = (*doctor.EXPORT_PACKAGES, "tensorrt-rtx")
    here = facts(*installed, backends=ALL_BACKENDS)
    assert verdict(here, "TensorRT-RTX engines")[0]
    assert not verdict(here, "TensorRT-RTX")[0]
    assert verdict(facts(*installed, backends=ALL_BACKENDS, nvidia=L4), "TensorRT-RTX")[0]
    ok, detail, fix = verdict(facts(*installed, backends=ALL_BACKENDS, nvidia=H200), "TensorRT-RTX")
    assert (ok, fix) == (False, 'pip install "specdec[tensorrt]"')
    assert detail.endswith("here: NVIDIA H200 (9.0)")
    absent = facts(*doctor.EXPORT_PACKAGES, backends=ALL_BACKENDS)
    assert verdict(absent, "TensorRT-RTX engines")[2] == 'pip install "specdec[rtx]"'


def test_tensorrt_needs_a_gpu_to_build_too() -> None:
    installed = (*doctor.EXPORT_PACKAGES, "tensorrt")
    for name in ("TensorRT", "TensorRT engines"):
        assert verdict(facts(*installed, backends=ALL_BACKENDS, nvidia=H200), name)[0]
        assert verdict(facts(*installed, backends=ALL_BACKENDS), name)[1] == NO_DRIVER.problem


@pytest.mark.parametrize("name", ["TensorRT", "TensorRT-RTX", "TensorRT engines", "TensorRT-RTX engines"])
def test_a_library_without_our_backend_promises_nothing(name: str) -> None:
    here = facts(*doctor.EXPORT_PACKAGES, "tensorrt", "tensorrt-rtx", nvidia=L4, backends=("ort",))
    ok, detail, fix = verdict(here, name)
    assert not ok
    assert detail.endswith("backend yet")
    assert fix is None


def test_a_tensorrt_library_alone_is_not_something_that_runs() -> None:
    assert not doctor.diagnose(facts("tensorrt", nvidia=L4, backends=("ort",))).ok


def test_json_holds_facts_and_verdicts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probes, "gather", lambda: facts("onnxruntime-gpu", ort=ORT_CUDA, nvidia=L4))
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"ok", "facts", "run", "build", "notes"}
    assert report["ok"] is True
    assert report["facts"]["nvidia"]["devices"] == [
        {"name": "NVIDIA L4", "compute_capability": "8.9", "memory_bytes": 24_000_000_000}
    ]
    assert report["run"][1] == {
        "name": "ONNX Runtime on CUDA",
        "ok": True,
        "detail": "onnxruntime-gpu 1.32.0 on NVIDIA L4 (8.9)",
        "fix": None,
    }


def test_the_gpu_is_shown_to_people() -> None:
    text = doctor.to_text(doctor.diagnose(facts("onnxruntime-gpu", ort=ORT_CUDA, nvidia=L4)))
    assert "NVIDIA L4, compute capability 8.9, 24.0 GB; driver 550.54.15, CUDA up to 12.4" in text


def test_a_failing_doctor_is_one_line_or_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Facts:
        raise RuntimeError("out of order")

    monkeypatch.setattr(probes, "gather", fail)
    assert doctor.main(["--json"]) == 1
    out, err = capsys.readouterr()
    hint = "run specdec-doctor again with --debug and report it"
    assert (out, err) == ("", f"specdec-doctor: error: RuntimeError: out of order; {hint}\n")
    assert doctor.main(["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--verbose"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--help"])
    assert stop.value.code == 0
    assert "examples:\n  specdec-doctor " in capsys.readouterr().out


def test_the_command_on_this_machine() -> None:
    command = [sys.executable, "-m", "specdec.tools.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert CPU in report["facts"]["onnxruntime"]["working"], "the tests run with ONNX Runtime installed"
    assert report["facts"]["cpu"]["cores"] == len(os.sched_getaffinity(0))


def test_export_packages_are_those_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extra = {re.split("[<>=]", line)[0] for line in project["optional-dependencies"]["export"]}
    assert extra == set(doctor.EXPORT_PACKAGES)
    assert set(doctor.EXPORT_PACKAGES) < set(probes.PACKAGES)


def answer(monkeypatch: pytest.MonkeyPatch, script: str) -> Nvidia:
    """Run `script` where a probe would run."""
    real = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-P", "-m", "specdec.tools.probes", "nvidia"]
        return real([sys.executable, "-c", script], **options)

    with monkeypatch.context() as patch:
        patch.setattr(nvidia.subprocess, "run", run)
        return probes.in_subprocess("nvidia", Nvidia)


def test_a_crashing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import os; os.kill(os.getpid(), {signal.SIGSEGV.value})"
    assert answer(monkeypatch, script) == Nvidia(problem="the library crashed: Segmentation fault")


def test_a_hanging_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "PROBE_SECONDS", 1)
    assert answer(monkeypatch, "import time; time.sleep(60)") == Nvidia(problem="no answer within 1 s")


def test_a_failing_probe_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "raise ValueError('odd driver')"
    assert answer(monkeypatch, script) == Nvidia(problem="the probe failed: ValueError: odd driver")
    assert answer(monkeypatch, "") == Nvidia(problem="the probe failed: exit code 0, no output")


def test_chatter_before_the_answer_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = msgspec.json.encode(L4).decode()
    assert answer(monkeypatch, f"print('loading ...'); print(); print({encoded!r}, end='')") == L4


def test_a_machine_without_libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvidia.ctypes, "CDLL", absent)
    assert nvidia.ask_driver() == Nvidia(problem="no NVIDIA driver (libcuda.so.1: cannot open shared object file)")


class FakeCuda:
    """The driver calls that the probe makes, for one device; `init` is what cuInit returns."""

    def __init__(self, init: int = 0) -> None:
        self.init = init

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12_080
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        handle._obj.value = 40 + index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:  # noqa: N802
        assert size == 256
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, handle: Any) -> int:  # noqa: N802
        size._obj.value = 150_000_000_000
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        assert handle.value == 40
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_devices_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: FakeCuda())
    found = nvidia.ask_driver()
    assert found.devices == H200.devices
    assert (found.cuda, found.problem) == ("12.8", None)


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: FakeCuda(init=100))
    found = nvidia.ask_driver()
    assert (found.devices, found.problem) == ((), "the NVIDIA driver reports CUDA error 100")


def test_the_identity_model_is_what_its_comments_say() -> None:
    import onnx

    model = onnx.ModelProto.FromString(probes.IDENTITY_MODEL)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]
    assert (model.ir_version, model.opset_import[0].version) == (8, 17)


class FakeSession:
    """A session that gets the CPU, whatever it is asked for."""

    def __init__(self, model: bytes, providers: list[str]) -> None:
        pass

    def get_providers(self) -> list[str]:
        return [CPU]


def test_a_provider_counts_only_when_a_session_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeSession)
    found = probes.probe_onnxruntime()
    assert (found.available, found.working, found.problem) == ((CUDA, CPU), (CPU,), None)


def test_an_onnxruntime_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = probes.probe_onnxruntime()
    assert (found.version, found.problem) == (None, "not installed")


def test_processor_and_memory_are_read_from_proc(tmp_path: Path) -> None:
    cpuinfo, meminfo = tmp_path / "cpuinfo", tmp_path / "meminfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Chip X\nflags\t\t: fpu avx2 avx512f amx_int8\n\n")
    meminfo.write_text("MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\n")
    found = probes.cpu(cpuinfo)
    assert (found.model, found.features) == ("Chip X", ("avx2", "avx512f", "amx_int8"))
    assert probes.memory(meminfo) == Memory(2048 * 1024, 1024 * 1024)
    assert probes.memory(tmp_path / "absent") == Memory(None, None)
    assert probes.cpu(tmp_path / "absent").features == ()

"""Facts about this machine: packages, ONNX Runtime's providers, the NVIDIA driver, processor and memory.

Whatever loads vendor code runs in a process of its own (`python -m specdec.tools.probes NAME`), because a library can
take its process down: an unsupported instruction, a driver that does not fit. A probe that fails is a fact too and says
why; nothing here raises. This module draws no conclusions: what the facts mean for specdec is `doctor`'s business.
"""

import argparse
import ctypes
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from specdec.engines.registry import backends

PACKAGES = (
    *("specdec", "numpy", "msgspec", "tokenizers", "jinja2"),
    *("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx"),
    *("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "gguf", "accelerate", "safetensors"),
    *("huggingface-hub", "rich"),
)
PROBE_SECONDS = 60  # loading CUDA libraries from a slow disk takes tens of seconds

# Features that decide how fast int8 and fp32 kernels are, as /proc/cpuinfo of x86-64 and of 64-bit ARM spells them.
CPU_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)

# An ONNX model of one node, Identity from float x[1] to y[1] (IR 8, opset 17), as serialized bytes: without the onnx
# package it is the smallest thing that shows which provider a session really gets.
IDENTITY_MODEL = bytes.fromhex(
    "0808"  # ir_version = 8
    "3a2f"  # graph, 47 bytes
    "0a10" "0a0178" "120179" "22084964656e74697479"  # node: x -> y, "Identity"
    "120167"  # name = "g"
    "5a0b" "0a0178" "1206" "0a04" "0801" "1200"  # input x: tensor of float, no dimensions
    "620b" "0a0179" "1206" "0a04" "0801" "1200"  # output y: the same
    "4204" "0a00" "1011"  # opset_import: default domain, version 17
)  # fmt: skip


class Device(msgspec.Struct, frozen=True):
    """One NVIDIA GPU. `compute_capability` as in "8.9"; memory in bytes."""

    name: str
    compute_capability: str
    memory_bytes: int


class Nvidia(msgspec.Struct, frozen=True):
    """What the NVIDIA driver says. `cuda` is the newest CUDA version that the driver supports."""

    driver: str | None = None
    cuda: str | None = None
    devices: tuple[Device, ...] = ()
    problem: str | None = None


class OnnxRuntime(msgspec.Struct, frozen=True):
    """`available`: providers compiled into the library. `working`: those that a session asked for and got."""

    version: str | None = None
    available: tuple[str, ...] = ()
    working: tuple[str, ...] = ()
    problem: str | None = None


class Cpu(msgspec.Struct, frozen=True):
    """`cores`: logical cores that this process may use; `features`: those of CPU_FEATURES that are present."""

    model: str
    cores: int
    features: tuple[str, ...]


class Memory(msgspec.Struct, frozen=True):
    """Main memory in bytes; None where the system does not tell."""

    total_bytes: int | None
    available_bytes: int | None


class Facts(msgspec.Struct, frozen=True):
    """Everything that is known about this machine. `backends`: the engines that this version of specdec can drive."""

    python: str
    platform: str
    packages: dict[str, str | None]
    backends: tuple[str, ...]
    onnxruntime: OnnxRuntime
    nvidia: Nvidia
    cpu: Cpu
    memory: Memory


def gather() -> Facts:
    """Probe everything; takes about a second."""
    return Facts(
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: package_version(name) for name in PACKAGES},
        backends=backends(),
        onnxruntime=in_subprocess("onnxruntime", OnnxRuntime),
        nvidia=in_subprocess("nvidia", Nvidia),
        cpu=cpu(),
        memory=memory(),
    )


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


ProbeResult = TypeVar("ProbeResult", OnnxRuntime, Nvidia)


def in_subprocess(probe: str, result: type[ProbeResult]) -> ProbeResult:
    """Run a probe in a process of its own; a crash, a hang or unreadable output becomes the result's `problem`."""
    command = [sys.executable, "-P", "-m", "specdec.tools.probes", probe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return result(problem=f"no answer within {PROBE_SECONDS} s")
    except OSError as exc:
        return result(problem=f"the probe did not start: {exc}")
    if done.returncode < 0:
        return result(problem=f"the library crashed: {signal.strsignal(-done.returncode)}")
    try:
        return msgspec.json.decode(done.stdout.rpartition("\n")[2], type=result)
    except msgspec.MsgspecError:
        last = (done.stderr.strip() or f"exit code {done.returncode}, no output").splitlines()[-1]
        return result(problem=f"the probe failed: {last}")


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return what the processor offers to this process; no features where /proc does not exist."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cpu(
        model=model[1] if model else platform.processor() or platform.machine(),
        cores=cores,
        features=tuple(name for name in CPU_FEATURES if name in present),
    )


def memory(meminfo: Path = Path("/proc/meminfo")) -> Memory:
    """Return total and available memory as Linux counts them."""
    text = meminfo.read_text() if meminfo.exists() else ""
    kib = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
    return Memory(*(int(kib[name]) * 1024 if name in kib else None for name in ("MemTotal", "MemAvailable")))


def probe_onnxruntime() -> OnnxRuntime:
    """Import ONNX Runtime and open a session on each provider that specdec uses. May crash: run it in_subprocess.

    Being available means being compiled in. Only a session tells whether the provider's own libraries load, because a
    session that was refused CUDA runs on the CPU without an error.
    """
    try:
        import onnxruntime as ort
    except ImportError as exc:
        absent = isinstance(exc, ModuleNotFoundError) and exc.name == "onnxruntime"
        return OnnxRuntime(problem="not installed" if absent else f"import fails: {one_line(exc)}")
    available = tuple(ort.get_available_providers())
    working, problem = [], None
    if "CUDAExecutionProvider" in available and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # finds the CUDA libraries that pip installed
    for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        if provider in available:
            try:
                session = ort.InferenceSession(IDENTITY_MODEL, providers=[provider])
                if provider in session.get_providers():
                    working.append(provider)
            except Exception as exc:  # the vendor raises its own types, which differ between versions
                problem = f"{provider}: {one_line(exc)}"
    return OnnxRuntime(ort.__version__, available, tuple(working), problem)


def probe_nvidia() -> Nvidia:
    """Ask libcuda for its devices. May crash: run it in_subprocess.

    Calls and attribute numbers are those of the CUDA driver API (cuda.h), which keeps them stable.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        return Nvidia(problem=f"no NVIDIA driver ({one_line(exc)})")
    kernel = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", kernel.read_text()) if kernel.exists() else None
    driver = found[1] if found else None
    number = ctypes.c_int()
    version = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if (code := cuda.cuInit(0)) or (code := cuda.cuDeviceGetCount(ctypes.byref(number))):
        return Nvidia(driver, version, problem=f"the NVIDIA driver reports CUDA error {code}")
    devices = tuple(_device(cuda, index) for index in range(number.value))
    return Nvidia(driver, version, devices, None if devices else "the NVIDIA driver shows no device")


def _device(cuda: ctypes.CDLL, index: int) -> Device:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    size, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # compute capability, major
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # and minor
    return Device(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", size.value)


def one_line(exc: BaseException) -> str:
    """Return the first line of an exception's message, or its type when it has none."""
    return str(exc).strip().partition("\n")[0] or type(exc).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one probe in this process and print its result as the last line, in JSON."""
    parser = argparse.ArgumentParser(prog="python -m specdec.tools.probes", description="Run one probe; prints JSON.")
    parser.add_argument("probe", choices=("onnxruntime", "nvidia"))
    options = parser.parse_args(argv)
    result = probe_onnxruntime() if options.probe == "onnxruntime" else probe_nvidia()
    sys.stdout.write("\n" + msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Facts about this machine: packages, ONNX Runtime's providers, the NVIDIA driver, processor and memory.

Whatever loads vendor code runs in a process of its own (`python -m specdec.tools.probes NAME`), because a library can
take its process down: an unsupported instruction, a driver that does not fit. A probe that fails is a fact too and says
why; nothing here raises. This module draws no conclusions: what the facts mean for specdec is `doctor`'s business.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specdec.engines.costs import processor
from specdec.engines.nvidia import Nvidia, ProbeResult, answer_of, ask_driver, one_line
from specdec.engines.registry import backends

PACKAGES = (
    *("specdec", "numpy", "msgspec", "tokenizers", "jinja2"),
    *("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx"),
    *("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "gguf", "accelerate", "safetensors"),
    *("huggingface-hub", "rich"),
)

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


def in_subprocess(probe: str, result: type[ProbeResult]) -> ProbeResult:
    """Run a probe in a process of its own; a crash, a hang or unreadable output becomes the result's `problem`."""
    return answer_of(["-m", "specdec.tools.probes", probe], result)


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return what the processor offers to this process; no features where /proc does not exist."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cpu(
        model=processor(cpuinfo),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one probe in this process and print its result as the last line, in JSON."""
    parser = argparse.ArgumentParser(prog="python -m specdec.tools.probes", description="Run one probe; prints JSON.")
    parser.add_argument("probe", choices=("onnxruntime", "nvidia"))
    options = parser.parse_args(argv)
    result = probe_onnxruntime() if options.probe == "onnxruntime" else ask_driver()
    sys.stdout.write("\n" + msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

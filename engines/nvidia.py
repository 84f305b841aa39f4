"""What the NVIDIA driver says of its GPUs, asked in a process of its own.

A library that finds no driver, or one that does not fit, can take its process down: TensorRT's runtime does so when it
is given an engine. So the driver is asked first, through libcuda alone, and elsewhere (`python -m
specdec.engines.nvidia`). A probe that fails is a fact too and says why; nothing here raises. This module knows no
engine and draws no conclusions.
"""

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

PROBE_SECONDS = 60  # loading CUDA libraries from a slow disk takes tens of seconds


class Device(msgspec.Struct, frozen=True):
    """One NVIDIA GPU. `compute_capability` as in "8.9"; memory in bytes."""

    name: str
    compute_capability: str
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """The compute capability as plans name it: "sm89" is 8.9."""
        return f"sm{self.compute_capability.replace('.', '')}"


class Nvidia(msgspec.Struct, frozen=True):
    """What the NVIDIA driver says. `cuda` is the newest CUDA version that the driver supports."""

    driver: str | None = None
    cuda: str | None = None
    devices: tuple[Device, ...] = ()
    problem: str | None = None


ProbeResult = TypeVar("ProbeResult", bound=msgspec.Struct)


def probe() -> Nvidia:
    """Ask the driver for its devices, in a process of its own; takes a tenth of a second."""
    return answer_of(["-m", "specdec.engines.nvidia"], Nvidia)


def answer_of(arguments: Sequence[str], result: type[ProbeResult]) -> ProbeResult:
    """Run Python with `arguments` and decode its last line of output, which is `result` in JSON.

    A crash, a hang or unreadable output becomes the result's `problem`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
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


def ask_driver() -> Nvidia:
    """Ask libcuda for its devices in this process. May crash: `probe` does it elsewhere.

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


if __name__ == "__main__":
    sys.stdout.write("\n" + msgspec.json.encode(ask_driver()).decode())

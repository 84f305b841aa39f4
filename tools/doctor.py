"""`specdec-doctor`: what this machine can run and build, what is missing, and the command that installs it.

Conclusions are a pure function of the facts that `probes` gathers. A backend that this version of specdec does not have
is reported as such, whatever is installed: a library alone generates no text. Nothing here loads a model or a bundle.
"""

import json
import sys
from collections.abc import Iterable, Sequence

import msgspec

from specdec.engines.command import CommandParser, run_command
from specdec.tools import probes
from specdec.tools.probes import Facts

# GPUs that TensorRT-RTX compiles for; the others need TensorRT.
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")

# What `specdec-export` imports, as distribution names: the extra `export` of pyproject.toml, a test compares them.
EXPORT_PACKAGES = (
    *("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "gguf", "accelerate"),
    *("safetensors", "huggingface-hub", "rich"),
)

PROG = "specdec-doctor"
EXAMPLES = """\
examples:
  specdec-doctor             a report for people
  specdec-doctor --json      the same as one JSON object: facts, "run", "build", "notes", "ok"

exit code: 0 when some engine can run here, 1 when none can, 2 for wrong usage
"""


class Verdict(msgspec.Struct, frozen=True):
    """Whether one thing can be done here, why or why not, and what to do about it (None: nothing to install)."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None


class Need(msgspec.Struct, frozen=True):
    """A condition, and what to say when it is not met."""

    met: bool
    detail: str
    fix: str | None = None


class Report(msgspec.Struct, frozen=True):
    """The facts and what follows from them."""

    facts: Facts
    run: tuple[Verdict, ...]
    build: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether some engine can run here."""
        return any(verdict.ok for verdict in self.run)


def diagnose(facts: Facts) -> Report:
    """Draw the conclusions."""
    return Report(facts, tuple(_run(facts)), tuple(_build(facts)), tuple(_notes(facts)))


def _run(facts: Facts) -> Iterable[Verdict]:
    packages, ort = facts.packages, facts.onnxruntime
    devices = ", ".join(f"{device.name} ({device.compute_capability})" for device in facts.nvidia.devices)
    ort_package = "onnxruntime-gpu" if packages["onnxruntime-gpu"] else "onnxruntime"
    yield _verdict(
        "ONNX Runtime on the CPU",
        f"{ort_package} {ort.version}",
        Need(
            bool(packages["onnxruntime"] or packages["onnxruntime-gpu"]),
            "ONNX Runtime is not installed",
            'pip install "specdec[cpu]"',
        ),
        Need(
            "CPUExecutionProvider" in ort.working,
            f"{ort_package} is installed and does not work: {ort.problem}",
            f"pip install --force-reinstall {ort_package}",
        ),
    )
    yield _verdict(
        "ONNX Runtime on CUDA",
        f"onnxruntime-gpu {ort.version} on {devices}",
        _gpu(facts, "gpu"),
        Need(
            bool(packages["onnxruntime-gpu"]),
            "onnxruntime-gpu is not installed",
            ("pip uninstall -y onnxruntime && " if packages["onnxruntime"] else "") + 'pip install "specdec[gpu]"',
        ),
        Need(
            "CUDAExecutionProvider" in ort.available,
            f"the installed ONNX Runtime {ort.version or ''} has no CUDA provider: "
            + (ort.problem or "another onnxruntime package lies over onnxruntime-gpu"),
            'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "specdec[gpu]"',
        ),
        Need(
            "CUDAExecutionProvider" in ort.working,
            "onnxruntime-gpu falls back to the CPU: the CUDA or cuDNN libraries do not load",
            'pip install "onnxruntime-gpu[cuda,cudnn]"',
        ),
    )
    yield _verdict(
        "TensorRT-RTX",
        f"tensorrt-rtx {packages['tensorrt-rtx']} on {devices}",
        _backend(facts, "tensorrt-rtx"),
        _gpu(facts, "rtx"),
        Need(
            any(device.compute_capability in RTX_CAPABILITIES for device in facts.nvidia.devices),
            f"TensorRT-RTX serves compute capabilities {', '.join(RTX_CAPABILITIES)}; here: {devices}",
            'pip install "specdec[tensorrt]"' if "tensorrt" in facts.backends else None,
        ),
        _installed(facts, "tensorrt-rtx", "rtx"),
    )
    yield _verdict(
        "TensorRT",
        f"tensorrt {packages['tensorrt']} on {devices}",
        _backend(facts, "tensorrt"),
        _gpu(facts, "tensorrt"),
        _installed(facts, "tensorrt", "tensorrt"),
    )


def _build(facts: Facts) -> Iterable[Verdict]:
    packages = facts.packages
    missing = [name for name in EXPORT_PACKAGES if not packages[name]]
    if packages["onnxruntime-gpu"] and "onnxruntime" in missing:
        missing.remove("onnxruntime")  # the same module, with more providers
    exporter = Need(not missing, f"missing: {', '.join(missing)}", 'pip install "specdec[export]"')
    yield _verdict(
        "bundles for ONNX Runtime", f"torch {packages['torch']}, transformers {packages['transformers']}", exporter
    )
    yield _verdict(
        "TensorRT-RTX engines",
        f"tensorrt-rtx {packages['tensorrt-rtx']}, compiled ahead of time, without a GPU",
        _backend(facts, "tensorrt-rtx"),
        exporter,
        _installed(facts, "tensorrt-rtx", "rtx"),
    )
    yield _verdict(
        "TensorRT engines",
        f"tensorrt {packages['tensorrt']}, for the GPU that is here",
        _backend(facts, "tensorrt"),
        exporter,
        _installed(facts, "tensorrt", "tensorrt"),
        _gpu(facts, "tensorrt"),
    )


def _notes(facts: Facts) -> Iterable[str]:
    if facts.packages["onnxruntime-gpu"] or facts.nvidia.devices:
        yield (
            "onnxruntime-gpu falls back to the CPU without an error when CUDA does not load, and still lists CUDA as "
            "available; this report opens a session and asks it which provider it got."
        )
    if facts.packages["onnxruntime"] and facts.packages["onnxruntime-gpu"]:
        yield (
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; keep one: "
            'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "specdec[gpu]"'
        )


def _verdict(name: str, ready: str, *needs: Need) -> Verdict:
    """Return "no" with the first need that is not met, or "yes"."""
    for need in needs:
        if not need.met:
            return Verdict(name, False, need.detail, need.fix)
    return Verdict(name, True, ready)


def _backend(facts: Facts, name: str) -> Need:
    return Need(name in facts.backends, f"specdec {facts.packages['specdec'] or ''} has no {name} backend yet")


def _gpu(facts: Facts, extra: str) -> Need:
    return Need(
        bool(facts.nvidia.devices),
        facts.nvidia.problem or "no NVIDIA GPU",
        f'with an NVIDIA GPU: install its driver, then pip install "specdec[{extra}]"',
    )


def _installed(facts: Facts, package: str, extra: str) -> Need:
    return Need(bool(facts.packages[package]), f"{package} is not installed", f'pip install "specdec[{extra}]"')


def to_json(report: Report) -> str:
    """Return the report as one indented JSON object."""
    fields: dict[str, object] = msgspec.to_builtins(report)
    return json.dumps({"ok": report.ok, **fields}, indent=2)


def to_text(report: Report) -> str:
    """Return the report as aligned plain text."""
    facts = report.facts
    packages = [(name, version or "-") for name, version in facts.packages.items()]
    features = " ".join(facts.cpu.features) or "no vector features known"
    driver = f"driver {facts.nvidia.driver or 'unknown'}, CUDA up to {facts.nvidia.cuda or 'unknown'}"
    machine = [
        ("Python", f"{facts.python} on {facts.platform}"),
        ("processor", f"{facts.cpu.model}, {facts.cpu.cores} cores: {features}"),
        ("memory", f"{_gigabytes(facts.memory.total_bytes)}, {_gigabytes(facts.memory.available_bytes)} available"),
        ("providers", ", ".join(facts.onnxruntime.available) or f"none: ONNX Runtime {facts.onnxruntime.problem}"),
    ]
    for gpu in facts.nvidia.devices:
        size = _gigabytes(gpu.memory_bytes)
        machine.append(("GPU", f"{gpu.name}, compute capability {gpu.compute_capability}, {size}; {driver}"))
    if not facts.nvidia.devices:
        machine.append(("GPU", facts.nvidia.problem or "none"))
    width = max(len(verdict.name) for verdict in report.run + report.build)
    lines = ["This machine", *_table(machine), "", "Packages", *_table(packages)]
    for title, verdicts in (("Can run", report.run), ("Can build", report.build)):
        lines += ["", title]
        for verdict in verdicts:
            lines.append(f"  {'yes' if verdict.ok else 'no ':3}  {verdict.name:{width}}  {verdict.detail}")
            if verdict.fix:
                lines.append(f"  {'':3}  {'':{width}}  -> {verdict.fix}")
    if report.notes:
        lines += ["", "Notes", *(f"  {note}" for note in report.notes)]
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:{width}}  {value}" for name, value in rows]


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 0 when some engine can run here, else 1."""
    description = "Tell what this machine can run and build with specdec, and what to install for the rest."
    parser = CommandParser(PROG, description, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    def examine() -> int:
        report = diagnose(probes.gather())
        print(to_json(report) if options.json else to_text(report))
        return 0 if report.ok else 1

    return run_command(PROG, examine, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())

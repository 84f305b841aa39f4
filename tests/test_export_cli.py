"""specdec-export as a user meets it: results, one-line errors, exit codes, and what is left after an interruption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from specdec.engines.contract import ModelSpec
from specdec.engines.errors import ExportError, GateError, ResourceError
from specdec.engines.manifest import Manifest, ModelDrafter, NgramDrafter, read_manifest, verify_files
from specdec.export import bundle, pipeline
from specdec.export.cli import main
from specdec.export.options import ExportOptions, Progress
from specdec.export.pipeline import export_bundle, memory_need
from specdec.export.report import EngineReport, report_text
from support.bundles import LOGITS_SIZE, MAX_LENGTH, TOKENIZER_SIZE, shared_checkpoint, tiny_checkpoint, tiny_gguf

COMMAND = [sys.executable, "-m", "specdec.export.cli"]


def export(output: Path, *arguments: str, model: Path | None = None) -> Manifest:
    assert main([str(model or shared_checkpoint()), "-o", str(output), "--quiet", *arguments]) == 0
    manifest = read_manifest(output)
    verify_files(output, manifest)
    return manifest


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on standard error."""
    try:
        code = main(arguments)
    except SystemExit as exc:  # argparse
        code = int(exc.code or 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("specdec-export: error: ")]
    assert captured.err.splitlines()[-1:] == lines
    return code, lines[0].removeprefix("specdec-export: error: ")


def test_bundle_with_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = export(tmp_path / "bundle")
    assert sorted(manifest.files) == [
        "chat_template.jinja",
        "generation_config.json",
        "target/fp32/model.onnx",
        "target/fp32/model.onnx.data",
        "tokenizer.json",
    ]
    assert (manifest.source.name, manifest.source.format, manifest.source.family) == ("llama-0", "safetensors", "llama")
    assert (manifest.limits.max_batch, manifest.limits.max_length, manifest.limits.max_tree) == (8, MAX_LENGTH, 64)
    assert manifest.drafters == {"ngram": NgramDrafter()}
    spec = manifest.target.spec
    assert (spec.vocab_size, spec.logits_size, spec.max_length) == (TOKENIZER_SIZE, LOGITS_SIZE, MAX_LENGTH)
    variant = manifest.target.variants["fp32"]
    assert variant.graph == "target/fp32/model.onnx"
    assert variant.parity.max_abs_error < variant.parity.tolerance == 1e-4
    assert variant.invariance.exact
    assert set(manifest.tools) == {"specdec", "torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime"}
    assert str(tmp_path) not in (tmp_path / "bundle" / "specdec.json").read_text()
    out = capsys.readouterr().out
    assert "bundle: " in out
    assert f"bit-equal in {variant.invariance.scorings} scorings" in out


@pytest.mark.slow
def test_two_exports_are_byte_identical(tmp_path: Path) -> None:
    first, second = export(tmp_path / "one"), export(tmp_path / "two")
    assert first.files == second.files
    assert (tmp_path / "one" / "specdec.json").read_bytes() == (tmp_path / "two" / "specdec.json").read_bytes()


def test_target_as_its_own_draft_is_stored_once(tmp_path: Path) -> None:
    model = shared_checkpoint()
    manifest = export(tmp_path / "bundle", "--drafter", "ngram", "--drafter", f"model:{model}")
    drafter = manifest.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    assert drafter.model == manifest.target
    assert drafter.shared_vocab == TOKENIZER_SIZE
    assert not [name for name in manifest.files if name.startswith("drafter/")]


@pytest.mark.slow
def test_another_draft_of_another_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tiny_checkpoint(tmp_path / "draft", "qwen2", 1, max_position_embeddings=256, vocab_size=TOKENIZER_SIZE)
    arguments = [str(shared_checkpoint()), "-o", str(tmp_path / "bundle"), "--drafter", f"model:{draft}", "--json"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert list(record) == ["bundle", "seconds", "manifest"]
    assert record["manifest"]["drafters"]["model"]["model"]["spec"]["max_length"] == 256
    assert "the draft's context is 256 tokens, the target's 1024" in captured.err
    manifest = read_manifest(tmp_path / "bundle")
    verify_files(tmp_path / "bundle", manifest)
    drafter = manifest.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    assert drafter.model.variants["fp32"].graph == "drafter/fp32/model.onnx"
    assert list(manifest.drafters) == ["model"]


def test_precisions_of_target_and_draft(tmp_path: Path) -> None:
    model = shared_checkpoint()
    manifest = export(tmp_path / "bundle", "--drafter", f"model:{model}", "--draft-precision", "fp16")
    drafter = manifest.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    variant = drafter.model.variants["fp16"]
    assert (variant.graph, drafter.model.spec.dtype) == ("drafter/fp16/model.onnx", "float16")
    assert variant.parity.max_abs_error < variant.parity.tolerance
    assert manifest.target.spec.dtype == "float32"


def test_a_quantized_pair_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path / "tiny", hidden_size=64, intermediate_size=96)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick brown fox\n\njumps over the lazy dog")
    arguments = [str(model), "-o", str(tmp_path / "bundle"), "--precision", "int8", "--draft-precision", "int4"]
    arguments += ["--drafter", f"model:{model}", "--keep", "lm_head*", "--calibration", str(prompts)]
    assert main([*arguments, "--report", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(engine["role"], engine["precision"]) for engine in record["report"]] == [
        ("target", "int8"),
        ("draft", "int4"),
    ]
    for engine in record["report"]:
        assert engine["damage"]["tokens"] > 500
        assert {(cost["batch"], cost["width"]) for cost in engine["pass_costs"]} >= {(1, 1), (1, 16), (4, 8)}
        assert all(0 < cost["best_ms"] <= cost["median_ms"] for cost in engine["pass_costs"])
    text = report_text(msgspec.convert(record["report"], list[EngineReport]))
    assert "target int8: 0 MB; ms a pass by tokens 1: " in text
    assert "lossless is relative to it" in text


def test_gguf_without_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    manifest = export(tmp_path / "bundle", "--drafter", "none", model=tiny_gguf(tmp_path / "tiny.gguf"))
    assert manifest.drafters == {}
    assert manifest.source.format == "gguf"
    assert manifest.tokenizer.has_chat_template


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = export(tmp_path / "bundle", "--max-batch", "2", "--max-length", "512", "--max-tree", "16")
    assert (manifest.limits.max_batch, manifest.limits.max_length, manifest.limits.max_tree) == (2, 512, 16)
    capsys.readouterr()
    model = str(shared_checkpoint())
    code, line = failure(capsys, model, "-o", str(tmp_path / "other"), "--max-length", "2048")
    assert (code, line) == (2, "--max-length 2048 is beyond the model's own 1024 tokens")


def test_long_contexts_are_capped_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "DEFAULT_MAX_LENGTH", 300)
    assert main([str(shared_checkpoint()), "-o", str(tmp_path / "bundle")]) == 0
    assert "max length is 300 tokens of the model's 1024; --max-length sets another" in capsys.readouterr().err
    assert read_manifest(tmp_path / "bundle").limits.max_length == 300


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--precision", "int3"],
            "precision int3 is not known: choose from fp32, fp16, bf16, int8, int4, int8-w8a8, fp8",
        ),
        (
            ["--draft-precision", "bf16"],
            "ort does not take precision bf16: it takes fp32, fp16, int8, int4, int8-w8a8, fp8",
        ),
        (
            ["--draft-precision", "fp16"],
            "--draft-precision is of a draft model or an EAGLE drafter (--drafter model:PATH, eagle:DIR): "
            "other drafters have the target's",
        ),
        (
            ["--backend", "openvino"],
            "backend openvino is not available in this version: choose from ort, tensorrt, tensorrt-rtx",
        ),
        (["--arch", "sm89"], "--arch is of tensorrt and tensorrt-rtx: name one of them with --backend"),
        (
            ["--precision", "fp8", "--backend", "tensorrt-rtx", "--arch", "sm86"],
            "precision fp8 needs compute capability 8.9 or newer, sm86 has 8.6: "
            "it takes fp32, fp16, bf16, int4, int8-w8a8",
        ),
        (["--workspace", "5"], "--workspace is of tensorrt and tensorrt-rtx: name one of them with --backend"),
        (["--workspace", "0", "--backend", "tensorrt-rtx"], "workspace is 0: it must be at least 1"),
        (["--keep", "*"], "--keep and --calibration are of quantized precisions: fp32 is none"),
        (
            ["--drafter", "hydra:x"],
            "drafter hydra:x is not available in this version: "
            "choose from ngram, model:PATH, layerskip:N, medusa:DIR, eagle:DIR, none",
        ),
        (["--drafter", "ngram", "--drafter", "none"], "drafter none stands alone"),
        (["--drafter", "ngram", "--drafter", "ngram"], "a bundle holds one drafter of each kind"),
        (["--drafter", "model:a", "--drafter", "model:b"], "a bundle holds one drafter of each kind"),
        (["--drafter", "model:"], "drafter model: needs a checkpoint, as in model:PATH"),
        (["--max-batch", "0"], "max_batch is 0: it must be at least 1"),
        (["--max-tree", "many"], "argument --max-tree: invalid int value: 'many' (see specdec-export --help)"),
        (["--speed", "fast"], "unrecognized arguments: --speed fast (see specdec-export --help)"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert failure(capsys, "model", "-o", "bundle", *arguments) == (2, line)


def test_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(capsys) == (
        2, "the following arguments are required: MODEL, -o/--output (see specdec-export --help)",
    )  # fmt: skip


def test_options_reject_unknown_fields() -> None:
    with pytest.raises(TypeError, match="max_bitch"):
        ExportOptions(model="m", output=Path("o"), max_bitch=3)  # type: ignore[call-arg]


def test_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, str(tmp_path / "nowhere.gguf"), "-o", str(tmp_path / "bundle"))
    assert (code, line) == (1, f"{tmp_path / 'nowhere.gguf'} does not exist")
    assert list(tmp_path.iterdir()) == []


def test_wrong_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = Path(shutil.copytree(shared_checkpoint(), tmp_path / "draft"))
    state = json.loads((draft / "tokenizer.json").read_text())
    names = {token: name for name, token in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {names[300]: 301, names[301]: 300}
    (draft / "tokenizer.json").write_text(json.dumps(state))
    model = str(shared_checkpoint())
    code, line = failure(capsys, model, "-o", str(tmp_path / "bundle"), "--drafter", f"model:{draft}")
    assert code == 1
    assert line.startswith("target and draft differ in 2 of 320 shared token ids (target / draft): 300: ")
    assert not (tmp_path / "bundle").exists()


def test_unsupported_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path(shutil.copytree(shared_checkpoint(), tmp_path / "odd"))
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    code, line = failure(capsys, str(odd), "-o", str(tmp_path / "bundle"))
    assert code == 1
    assert "bloom" in line
    assert "\n" not in line


def test_a_failed_gate_means_no_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = pipeline.write_graph

    def write_other_weights(graph, weights, path, progress, grids):  # type: ignore[no-untyped-def]
        changed = {name: tensor.clone() for name, tensor in weights.items()}
        changed["model.layers.1.mlp.down_proj.weight"] *= 1.01
        written(graph, changed, path, progress, grids)

    monkeypatch.setattr(pipeline, "write_graph", write_other_weights)
    code, line = failure(capsys, str(shared_checkpoint()), "-o", str(tmp_path / "bundle"))
    assert code == 1
    assert line.startswith("parity gate failed: ")
    assert " in case 'ragged prefill', row 0, position 9, logit of token " in line
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GateError):
        export_bundle(ExportOptions(model=str(shared_checkpoint()), output=tmp_path / "bundle"))


def test_an_existing_bundle_costs_no_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "specdec.json").write_text("{}")
    code, line = failure(capsys, "no such model", "-o", str(tmp_path / "bundle"))
    assert code == 1
    assert line.endswith("exists already: choose another output, or replace it with --force")
    export(tmp_path / "bundle", "--force")


def test_resources_are_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []

    class Stages(Progress):
        def stage(self, name: str) -> None:
            stages.append(name)

    options = ExportOptions(model=str(shared_checkpoint()), output=tmp_path / "bundle")
    monkeypatch.setattr(bundle, "available_memory", lambda: 2**28)
    with pytest.raises(ResourceError, match=r"the export needs 1\.1 GiB of memory, 0\.2 GiB are available"):
        export_bundle(options, Stages())
    assert stages == ["target: checkpoint", "target: tokenizer", "target: trace"]
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "SMALL_FILES", 2**60)
    with pytest.raises(ResourceError, match="on disk"):
        export_bundle(options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "logits", "hidden", "weights", "peak"),  # bytes, and peak memory as measured
    [
        ("float32", 49152, 576, 538 * 10**6, 1.43e9),  # SmolLM2-135M from a GGUF
        ("float16", 49152, 576, 269 * 10**6, 1.43e9),
        ("float32", 262144, 640, 1073 * 10**6, 3.48e9),  # Gemma 3 270M from a GGUF
    ],
)
def test_memory_need_covers_what_was_measured(
    dtype: Literal["float32", "float16"], logits: int, hidden: int, weights: int, peak: float
) -> None:
    spec = ModelSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        hidden_size=hidden,
        logits_size=logits,
        vocab_size=logits,
        max_length=64,
        dtype=dtype,
    )
    need = memory_need(spec, weights)
    assert peak < need < 1.5 * peak
    assert need <= 2 * weights + 1.5e9 or dtype == "float16"


def test_unexpected_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline, "write_graph", fail)
    arguments = [str(shared_checkpoint()), "-o", str(tmp_path / "bundle"), "--quiet"]
    code, line = failure(capsys, *arguments)
    assert (code, line) == (
        1,
        "OSError: [Errno 28] No space left on device; run specdec-export again with --debug and report it",
    )
    assert main([*arguments, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err

    def lacks(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(pipeline, "export_bundle", lacks)
    assert failure(capsys, *arguments) == (1, 'gguf is not installed: pip install "specdec[export]"')


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys\nfrom specdec.export.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'rich'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout
    assert "--drafter SPEC" in done.stdout


def started(output: Path) -> "subprocess.Popen[str]":
    """A real export in a process of its own, once it has begun to write."""
    process = subprocess.Popen(
        [*COMMAND, str(shared_checkpoint()), "-o", str(output)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(output.parent.glob(f".{output.name}.partial-*/target")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path / "bundle")
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    assert err == f"specdec-export: stopped by {number.name}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_kill_9_leaves_no_bundle_and_the_next_run_clears_up(tmp_path: Path) -> None:
    process = started(tmp_path / "bundle")
    process.kill()
    process.communicate()
    assert [path.name.startswith(".bundle.partial-") for path in tmp_path.iterdir()] == [True]
    assert not list(tmp_path.rglob("specdec.json"))
    export(tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.slow
def test_standard_error_stays_clean(tmp_path: Path) -> None:
    """No warnings, advice or bars of the libraries reach standard error."""
    done = subprocess.run(
        [*COMMAND, str(shared_checkpoint()), "-o", str(tmp_path / "bundle"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["bundle"] == str(tmp_path / "bundle")


def test_incomplete_weights_leave_no_bundle(tmp_path: Path) -> None:
    odd = Path(shutil.copytree(shared_checkpoint(), tmp_path / "odd"))
    weights = load_file(odd / "model.safetensors")
    save_file({name: weights[name] for name in list(weights)[1:]}, odd / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="missing weights"):
        export_bundle(ExportOptions(model=str(odd), output=tmp_path / "bundle"))
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]

"""What MODEL may be, and one clear line for everything else."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.errors as hub_errors
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engines.errors import SourceError, UnsupportedModelError
from specdec.export import sources
from specdec.export.sources import open_checkpoint
from support.bundles import shared_checkpoint, tiny_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_checkpoint(), tmp_path / "tiny"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.format, checkpoint.path) == ("tiny", "safetensors", folder)
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.generation_config()["eos_token_id"] == [2, 0]
    model = checkpoint.load(torch.float32)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert checkpoint.load(torch.float16).dtype == torch.float16


def test_gguf(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_gguf(tmp_path / "tiny.Q4.gguf")))
    assert (checkpoint.name, checkpoint.format) == ("tiny.Q4", "gguf")
    assert checkpoint.config.num_hidden_layers == 2
    model = checkpoint.load(torch.float32)
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    assert checkpoint.generation_config() == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "nowhere is neither a folder, a .gguf file nor a hub id (org/name)"),
        ("/no/such/folder/at/all", "is neither a folder"),
        ("missing.gguf", "missing.gguf does not exist"),
    ],
)
def test_nothing_there(model: str, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        open_checkpoint(model)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"")
    with pytest.raises(SourceError, match=rf"pickled weights only \({name}\).*save_pretrained"):
        open_checkpoint(str(folder))
    with pytest.raises(SourceError, match="holds pickled weights, which can run code"):
        open_checkpoint(str(folder / name))


def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert open_checkpoint(str(folder)).load(torch.float32).dtype == torch.float32


def test_incomplete_folders(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "other")
    with pytest.raises(
        SourceError, match=r"has no weights: neither model.safetensors nor model.safetensors.index.json"
    ):
        open_checkpoint(str(folder))
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "other").rename(folder / "model-1-of-2.safetensors")
    with pytest.raises(SourceError, match=r"1 of 2 shards missing \(model-2-of-2.safetensors"):
        open_checkpoint(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(SourceError, match=r"has no config.json: not a Hugging Face checkpoint"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_damaged_safetensors(folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes({"truncated": content[:-1], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(SourceError, match=r"model.safetensors is truncated or damaged"):
        open_checkpoint(str(folder))


def test_missing_and_misshapen_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    lost = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(lost, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"1 missing weights \(model.layers.1.mlp.up_proj.weight"):
        open_checkpoint(str(folder)).load(torch.float32)
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model.norm.weight|mismatch"):
        open_checkpoint(str(folder)).load(torch.float32)


def test_broken_configs(folder: Path) -> None:
    change_config(folder, model_type="does-not-exist")
    with pytest.raises(SourceError, match=r"config.json is not usable: .*does-not-exist"):
        open_checkpoint(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config.json cannot be read"):
        open_checkpoint(str(folder))
    (folder / "config.json").write_text("[]")
    with pytest.raises(SourceError, match=r"config.json is not a JSON object"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantized_checkpoints_are_refused_by_name(folder: Path, method: str) -> None:
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=rf"is already quantized \({method}\)"):
        open_checkpoint(str(folder))


def test_custom_code_needs_trust(folder: Path) -> None:
    ran = folder.parent / "ran"
    (folder / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nraise RuntimeError('custom code')\n")
    change_config(folder, model_type="homemade", auto_map={"AutoConfig": "custom.Config"})
    with pytest.raises(SourceError, match=r"needs Python code of its own .*--trust-remote-code"):
        open_checkpoint(str(folder))
    assert not ran.exists()
    with pytest.raises(SourceError, match="custom code"):
        open_checkpoint(str(folder), trust_remote_code=True)
    assert ran.exists()


def test_custom_code_of_a_known_family_is_not_run(folder: Path) -> None:
    (folder / "custom.py").write_text("raise RuntimeError('custom code')\n")
    change_config(folder, auto_map={"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"})
    assert open_checkpoint(str(folder)).load(torch.float32).config.model_type == "llama"


@pytest.mark.parametrize("keep", [6, 24, 2000, -100])
def test_truncated_gguf(tmp_path: Path, keep: int) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"tiny.gguf is truncated or damaged"):
        open_checkpoint(str(path))


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4")
    with pytest.raises(SourceError, match="is not a GGUF file"):
        open_checkpoint(str(path))


def test_gguf_features_that_its_reader_drops_are_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", llama__rope__scaling__type="yarn")
    with pytest.raises(UnsupportedModelError, match="carries rope scaling yarn, which the GGUF reader drops"):
        open_checkpoint(str(path))
    path = tiny_gguf(tmp_path / "other.gguf", general__architecture="whisper")
    with pytest.raises(UnsupportedModelError, match="whisper is not supported"):
        open_checkpoint(str(path))


class _Response:
    """What the hub's exceptions want to hold."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 403
    text = ""


def _hub_error(kind: type[Exception]) -> Exception:
    try:
        return kind("first line\nsecond line", response=_Response())  # type: ignore[call-arg]
    except TypeError:
        return kind("first line\nsecond line")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.GatedRepoError, "org/model is gated: accept its licence on huggingface.co"),
        (hub_errors.RevisionNotFoundError, "org/model has no revision v9"),
        (hub_errors.RepositoryNotFoundError, "org/model is neither a folder here nor a public model on huggingface.co"),
        (hub_errors.LocalEntryNotFoundError, "org/model at revision v9 is not here and the hub is not reachable"),
        (hub_errors.OfflineModeIsEnabled, "org/model at revision v9 is not here and the hub is not reachable"),
        (hub_errors.HfHubHTTPError, "org/model at revision v9: the hub answered: first line"),
        (ConnectionError, "org/model at revision v9 cannot be downloaded: first line"),
    ],
)
def test_hub_failures(monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise _hub_error(error)

    monkeypatch.setattr(sources, "snapshot_download", download)
    with pytest.raises(SourceError) as caught:
        open_checkpoint("org/model", revision="v9")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_hub_download_asks_for_no_pickles_and_no_code(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(folder)

    monkeypatch.setattr(sources, "snapshot_download", download)
    checkpoint = open_checkpoint("org/model", revision="v1")
    assert (checkpoint.name, asked["repo"], asked["revision"]) == ("org/model", "org/model", "v1")
    assert not {"*.bin", "*.py", "*.pt"} & set(asked["allow_patterns"])
    open_checkpoint("org/model", trust_remote_code=True)
    assert "*.py" in asked["allow_patterns"]

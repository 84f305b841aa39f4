"""What a checkpoint says about its tokenizer arrives in the bundle, from every place where it may be written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from specdec.engines.errors import SourceError, UnsupportedModelError
from specdec.export import tokenizer as module
from specdec.export.sources import open_checkpoint
from specdec.export.tokenizer import TokenizerFiles, cache_dir, read_tokenizer
from support.bundles import CHATML, TOKENIZER_SIZE, shared_checkpoint, tiny_gguf, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_checkpoint(), tmp_path / "tiny"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(path: Path) -> TokenizerFiles:
    return read_tokenizer(open_checkpoint(str(path)))


def change(folder: Path, name: str = "tokenizer_config.json", **changes: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    path.write_text(json.dumps(content))


def test_folder_is_copied_verbatim(folder: Path, tmp_path: Path) -> None:
    files = read(folder)
    assert files.json == (folder / "tokenizer.json").read_bytes()
    assert files.vocab_size == TOKENIZER_SIZE
    assert files.record.eos_token_ids == [0, 2]
    assert files.record.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",  # from pad_token_id of the model's config
    }
    out = tmp_path / "out"
    out.mkdir()
    files.write(out)
    assert (out / "tokenizer.json").read_bytes() == files.json
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_chat_template_places(folder: Path) -> None:
    change(folder, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    assert read(folder).chat_template == "D"
    change(folder, chat_template=[{"name": "tool_use", "template": "T"}])
    assert read(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("own file")
    assert read(folder).chat_template == "own file"
    (folder / "chat_template.jinja").unlink()
    change(folder, chat_template=None)
    files = read(folder)
    assert (files.chat_template, files.record.has_chat_template) == (None, False)
    change(folder, chat_template=3)
    with pytest.raises(SourceError, match="chat template"):
        read(folder)


def test_end_tokens_are_the_union(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read(folder).record.eos_token_ids == [2]
    change(folder, "generation_config.json", eos_token_id=0)
    assert read(folder).record.eos_token_ids == [0, 2]
    change(folder, eos_token="<|im_start|>")
    assert read(folder).record.eos_token_ids == [0, 1, 2]


def test_special_tokens_written_as_objects_or_in_the_map(folder: Path) -> None:
    change(folder, bos_token={"content": "<|im_end|>", "special": True}, eos_token=None)
    change(folder, "special_tokens_map.json", eos_token={"content": "<|im_start|>"})
    special = read(folder).record.special_tokens
    assert (special["bos_token"], special["eos_token"]) == ("<|im_end|>", "<|im_start|>")


@pytest.mark.parametrize(("wanted", "first"), [(True, 1), (False, None), (None, None)])
def test_bos_is_added_as_the_config_says(folder: Path, wanted: bool | None, first: int | None) -> None:
    change(folder, add_bos_token=wanted)
    files = read(folder)
    ids = files.backend().encode("the fox").ids
    plain = tiny_tokenizer().encode("the fox").ids
    assert ids == ([first, *plain] if first is not None else plain)
    if not wanted:
        assert files.json == (folder / "tokenizer.json").read_bytes()


def test_bos_is_removed_as_the_config_says(folder: Path) -> None:
    backend = tiny_tokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert read(folder).backend().encode("fox").ids[0] == 1
    change(folder, add_bos_token=False)
    assert read(folder).backend().encode("fox").ids == tiny_tokenizer().encode("fox").ids


def test_added_tokens_count(folder: Path) -> None:
    backend = tiny_tokenizer()
    backend.add_special_tokens(["<tool>"])
    backend.save(str(folder / "tokenizer.json"))
    assert read(folder).vocab_size == TOKENIZER_SIZE + 1


def test_truncation_and_padding_of_training_are_dropped(folder: Path) -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    assert read(folder).backend().encode(text).ids == tiny_tokenizer().encode(text).ids


def test_broken_tokenizers(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(SourceError, match=r"the tokenizer of .*tiny is damaged"):
        read(folder)
    lossy = tiny_tokenizer()
    lossy.normalizer = tokenizers.normalizers.Replace("x", "")  # type: ignore[assignment]
    lossy.save(str(folder / "tokenizer.json"))
    with pytest.raises(SourceError, match="decodes 'Héllo"):
        read(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(SourceError, match="has no tokenizer that can be converted"):
        read(folder)


def test_slow_tokenizer_is_converted(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]) + "\n"
    )
    change(folder, tokenizer_class="GPT2Tokenizer", bos_token="<|endoftext|>")
    files = read(folder)
    assert files.backend().encode("the quick fox").ids == tiny_tokenizer().encode("the quick fox").ids


def test_gguf(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read(tiny_gguf(tmp_path / "tiny.gguf"))
    assert files.vocab_size == TOKENIZER_SIZE
    assert files.chat_template == CHATML
    assert files.record.special_tokens["eos_token"] == "<|im_end|>"
    assert files.record.eos_token_ids == [2]
    backend = files.backend()
    assert backend.encode("<|im_start|>the fox<|im_end|>").ids == [1, *tiny_tokenizer().encode("the fox").ids, 2]
    assert backend.encode("a 123").tokens == ["a", "Ġ", "1", "2", "3"]  # the pre-tokenizer "smollm" splits digits
    assert len(list((own_cache / "tokenizers").iterdir())) == 1

    def convert(checkpoint: object) -> bytes:
        raise AssertionError("converted twice")

    monkeypatch.setattr(module, "_convert", convert)
    assert read(tmp_path / "tiny.gguf").json == files.json


def test_gguf_with_an_unknown_splitter(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", splitter="new-and-clever")
    with pytest.raises(
        UnsupportedModelError, match="splits text by 'new-and-clever', which its conversion does not know"
    ):
        read(path)


@pytest.mark.parametrize(("wanted", "first"), [(True, 1), (False, None)])
def test_gguf_bos(tmp_path: Path, wanted: bool, first: int | None) -> None:
    files = read(tiny_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__add_bos_token=wanted))
    plain = tiny_tokenizer().encode("the fox").ids
    assert files.backend().encode("the fox").ids == ([first, *plain] if first is not None else plain)


def test_gguf_with_a_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    assert read(tiny_gguf(tmp_path / "tiny.gguf")).vocab_size == TOKENIZER_SIZE


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SPECDEC_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "specdec"

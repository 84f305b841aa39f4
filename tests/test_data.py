"""Training data: what the target wrote and held is kept exactly, whatever was interrupted, and shares never mix."""

import itertools
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from specdec.engines.errors import EngineError, RequestError
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.runtime import LLM, SpeculativeConfig
from specdec.runtime.kv import CachedModel
from specdec.runtime.text import TextCodec
from specdec.train import data, writing
from specdec.train.data import Data
from specdec.train.prompts import Turn, answering, asking, usable
from specdec.train.writing import make_data
from support.bundles import shared_bundle, shared_checkpoint

PROMPTS = [f"{word} {number}" for number in range(6) for word in ("the quick brown fox", "add", "one, two,", "a draft")]


@cache
def tapped_bundle() -> Path:
    output = Path(mkdtemp(prefix="specdec-tapped-")) / "bundle"
    export_bundle(ExportOptions(model=str(shared_checkpoint()), output=output, drafters=("none",), taps=("1", "final")))
    return output


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD", 4)
    monkeypatch.setattr(writing, "ROWS", 3)


def make(folder: Path, tokens: int, prompts: list[str] | None = PROMPTS, seed: int = 0) -> Data:
    return make_data(tapped_bundle(), folder, tokens=tokens, prompts=prompts, seed=seed, answer_tokens=12, threads=1)


def all_rows(made: Data) -> list[data.TextRow]:
    return [*made.rows("train"), *made.rows("held-out")]


def test_rows_are_the_targets_own_answers_and_its_states_at_every_token(tmp_path: Path) -> None:
    made = make(tmp_path / "data", 200)
    assert made.tokens >= 200
    assert made.taps == ("1", "final")
    manifest = read_manifest(tapped_bundle())
    variant = next(iter(manifest.target.variants.values()))
    engine = open_engine(tapped_bundle() / variant.graph, manifest.target.spec, EngineConfig(threads=1))
    text = TextCodec(tapped_bundle(), manifest.tokenizer)
    turn = Turn.of(text)
    known = {
        (*turn.before, *text.encode(prompt, special=False), *turn.after): index for index, prompt in enumerate(PROMPTS)
    }
    with LLM(tapped_bundle(), speculative=SpeculativeConfig(method=None), engine=EngineConfig(threads=1)) as llm:
        rows = all_rows(made)
        assert sum(len(row.tokens) for row in rows) == made.tokens
        for row in rows:
            prompt = tuple(row.tokens[: row.answer].tolist())
            alone = llm.generate(list(prompt), answering(known[prompt], 0, 12))[0]
            assert row.tokens[row.answer :].tolist() == list(alone.token_ids[:-1])
            cached = CachedModel(engine, max_rows=1, min_width=1, keeps_hidden=True)
            cached.add_row()
            cached.prefill(0, row.tokens.tolist())
            assert np.array_equal(row.features, cached.take_hidden(0).astype(np.float16))


def test_an_interrupted_run_goes_on_to_the_same_shards(tmp_path: Path) -> None:
    make(tmp_path / "whole", 300)
    make(tmp_path / "parts", 1)
    (tmp_path / "parts" / "00001.part").write_bytes(b"half a shard")
    make(tmp_path / "parts", 300)
    shards = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert len(shards) > 2
    for name in shards:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").iterdir()}
    make(tmp_path / "whole", 300)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").iterdir()}


def test_a_prompt_stays_in_its_share_when_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "HELD_OUT", 3)

    def held_out(made: Data) -> set[tuple[int, ...]]:
        return {tuple(row.tokens[: row.answer]) for row in made.rows("held-out")}

    few = held_out(make(tmp_path / "data", 100))
    more = make(tmp_path / "data", 400)
    train = {tuple(row.tokens[: row.answer]) for row in more.rows("train")}
    assert few < held_out(more)
    assert not train & held_out(more)
    assert len(train) > len(held_out(more))


def test_data_of_another_kind_is_not_mixed_in(tmp_path: Path) -> None:
    make(tmp_path, 50)
    with pytest.raises(RequestError, match="another seed: choose another folder"):
        make(tmp_path, 50, seed=1)
    with pytest.raises(RequestError, match="another prompts"):
        make(tmp_path, 50, PROMPTS[:-1])
    with pytest.raises(RequestError, match="holds no training data"):
        Data(tmp_path / "elsewhere")
    (tmp_path / "data.json").write_text('{"taps": []}')
    with pytest.raises(RequestError, match="not of this version"):
        Data(tmp_path)


def test_prompts_that_run_out_are_said_and_what_was_written_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"answered, with \d+ of 100000 tokens"):
        make(tmp_path, 100000)
    assert {row.answer for row in all_rows(Data(tmp_path))}
    assert len(all_rows(Data(tmp_path))) == len(PROMPTS)


def test_an_engine_that_fails_ends_the_writing_and_leaves_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, passes = CachedModel.step, itertools.count()

    def failing(self: CachedModel, *inputs: Any) -> Any:
        if next(passes) == 30:
            raise EngineError("the chip is on fire")
        return step(self, *inputs)

    monkeypatch.setattr(CachedModel, "step", failing)
    with pytest.raises(EngineError, match="the chip is on fire"):
        make(tmp_path, 100000)
    monkeypatch.undo()
    monkeypatch.setattr(writing, "SHARD", 4)
    assert all(len(row.tokens) == len(row.features) > row.answer for row in all_rows(Data(tmp_path)))


def test_a_target_writes_its_own_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is what it answers, here whatever it said; a model that says nothing of use is an error."""
    monkeypatch.setattr(writing, "usable", lambda said, reason: False)
    with pytest.raises(RequestError, match="none that ends"):
        make(tmp_path / "none", 50, None)
    monkeypatch.setattr(writing, "usable", lambda said, reason: True)
    made = make(tmp_path / "own", 300, None)
    text = TextCodec(tapped_bundle(), read_manifest(tapped_bundle()).tokenizer)
    turn = Turn.of(text)
    with LLM(tapped_bundle(), speculative=SpeculativeConfig(method=None), engine=EngineConfig(threads=1)) as llm:
        asked = [llm.generate(list(turn.before), asking(number, 0))[0].token_ids[:-1] for number in range(4)]
    expected = {(*turn.before, *said, *turn.after) for said in asked}
    assert expected <= {tuple(row.tokens[: row.answer]) for row in all_rows(made)}


def test_what_can_be_answered_ends_and_says_something() -> None:
    assert usable([5, 6, 7, 2], "stop")
    assert not usable([5, 6, 7, 8], "length")
    assert not usable([5, 2], "stop")


def test_a_bundle_without_hidden_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="export it with --tap"):
        make_data(shared_bundle(), tmp_path / "data", tokens=10)
    assert not (tmp_path / "data").exists()

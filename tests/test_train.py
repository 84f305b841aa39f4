"""Training: offsets of every label, chains as they will be drafted, runs that end with the same bits however broken."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.engines.errors import RequestError, SourceError
from specdec.export.eagle_files import EMBEDDING, draft_ids, read_eagle, write_eagle
from specdec.export.eagle_model import EagleConfig, EagleModel, eagle_config
from specdec.export.medusa_model import read_medusa
from specdec.export.sources import open_checkpoint
from specdec.export.tokenizer import read_tokenizer
from specdec.train import cli
from specdec.train.batches import Batch, collate, epoch_steps, learnable, positions, spread
from specdec.train.data import Data, DataRecord, TextRow
from specdec.train.distill import DistillLearner, choose_layers, pruned
from specdec.train.eagle import DEPTH, EagleLearner
from specdec.train.figures import Figures
from specdec.train.loop import PATIENCE, Learner, Loop, Schedule, State
from specdec.train.medusa import MedusaLearner
from specdec.train.options import TrainOptions, TrainProgress
from specdec.train.run import CHECKPOINT, TRAINING, train
from specdec.train.saved import load_state
from specdec.train.target import Target, draft_vocabulary
from support.bundles import LOGITS_SIZE, TOKENIZER_SIZE, tiny_checkpoint, tiny_gguf

CPU = torch.device("cpu")
TAPS = ("1", "final")
METHODS: dict[str, dict[str, Any]] = {"medusa": {"heads": 2}, "eagle": {"taps": ("1",)}, "distill": {"keep": 1}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of these sizes are quickest alone, and the bits of a run depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def checkpoint() -> Path:
    """A target that can be learned: its layers say little, so a token has much the same follower wherever it stands."""
    return tiny_checkpoint(Path(mkdtemp(prefix="specdec-train-")) / "target", initializer_range=0.06)


@cache
def hf_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.float32).eval().requires_grad_(False)


@cache
def shared_data() -> Path:
    """Greedy texts of the tiny target with its hidden states, by PyTorch."""
    model, rng = hf_model(), np.random.default_rng(0)
    prompts = torch.tensor(rng.integers(3, 300, (80, 4)))
    tokens = model.generate(
        prompts,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=list(range(TOKENIZER_SIZE, LOGITS_SIZE)),
    )
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[1], states[-1]], -1).half()
    lengths = rng.integers(16, 29, len(tokens))
    rows = [TextRow(t[:n].numpy(), f[:n].numpy(), 4) for t, f, n in zip(tokens, features, lengths, strict=True)]
    return write_data(Path(mkdtemp(prefix="specdec-data-")) / "data", rows)


def write_data(folder: Path, rows: list[TextRow], taps: tuple[str, ...] = TAPS, hidden: int = 48) -> Path:
    folder.mkdir()
    record = DataRecord(
        target="0", taps=taps, hidden_size=hidden, vocab_size=320, prompts="own", seed=0, answer_tokens=24
    )
    (folder / "data.json").write_bytes(msgspec.json.encode(record))
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    tensors = {
        "tokens": torch.from_numpy(np.concatenate([row.tokens for row in rows]).astype(np.int32)),
        "features": torch.from_numpy(np.concatenate([row.features for row in rows])),
        "starts": torch.from_numpy(starts.astype(np.int32)),
        "answers": torch.tensor([row.answer for row in rows], dtype=torch.int32),
    }
    save_file(tensors, folder / "00000.safetensors")
    return folder


def options(method: str, output: Path, **changes: Any) -> TrainOptions:
    fixed = {"steps": 40, "step_tokens": 400, "draft_vocab": 100, "learning_rate": 5e-3}
    settings = {"model": str(checkpoint()), "data": shared_data(), **fixed, **METHODS[method], **changes}
    return TrainOptions(method=method, output=output, **settings)  # type: ignore[arg-type]


def vocabulary(rows: Iterable[TextRow], size: int, known: int = 20, always: Iterable[int] = ()) -> list[int]:
    found = draft_vocabulary(rows, known, size, always)
    assert found is not None
    return list(found)


def target() -> Target:
    return Target(hf_model(), CPU)


def learners() -> dict[str, Learner]:
    """One learner of each kind, not at a neutral start, and the columns of features that the first two read."""
    ids = draft_vocabulary(Data(shared_data()).rows("train"), 320, 60)
    config = eagle_config(hf_model().config, draft_vocab_size=60, taps=("1",))
    made: dict[str, Learner] = {
        "medusa": MedusaLearner(target(), 2, ids),
        "eagle": EagleLearner(config, target(), ids, 2, torch.linspace(0.5, 2.0, 48)),
        "distill": DistillLearner(
            pruned(hf_model(), [0]), target(), read_tokenizer(open_checkpoint(str(checkpoint()))),
            train_embeddings=False,
        ),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    for learner in made.values():
        with torch.no_grad():
            for parameter in learner.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def columns(method: str) -> torch.Tensor:
    return torch.arange(96) if method == "eagle" else torch.arange(48, 96)


def batch_of(rows: list[TextRow], method: str) -> Batch:
    return collate(rows, columns(method), CPU)


# What a run leaves


@pytest.mark.parametrize("method", METHODS)
def test_a_run_beats_the_untrained_drafter_and_says_what_it_is_worth(method: str, tmp_path: Path) -> None:
    training = train(options(method, tmp_path / "out"))
    first = training.history[0]
    assert first.step == 0
    assert 20 <= training.steps == training.history[-1].step <= 40
    assert training.held_out_loss < first.held_out_loss
    assert training.tau > first.tau + 0.05
    assert training.tau == pytest.approx(1 + np.cumprod(training.acceptance).sum())
    stored = json.loads((tmp_path / "out" / TRAINING).read_text())
    assert stored["tau"] == training.tau
    assert str(tmp_path) not in json.dumps(stored)
    assert str(checkpoint()) not in json.dumps(stored)
    assert not (tmp_path / "out" / CHECKPOINT).exists()
    config = open_checkpoint(str(checkpoint())).config
    ends = read_tokenizer(open_checkpoint(str(checkpoint()))).record.eos_token_ids
    assert ends
    wanted = vocabulary(Data(shared_data()).rows("train"), 100, 320, ends)
    if method == "eagle":
        read, state = read_eagle(tmp_path / "out", config)
        assert (read.taps, read.draft_vocab_size) == (("1",), 100)
        assert "embed_tokens.weight" not in state
        assert state["fc.weight"].dtype == torch.float16
        ids = draft_ids(read, state)
        assert ids is not None
        assert ids.tolist() == wanted
        assert state["t2d"].nonzero().flatten().tolist() == ids.tolist()
    elif method == "medusa":
        heads = read_medusa(tmp_path / "out", config)
        assert heads.ids is not None
        assert heads.ids.tolist() == wanted
        table = np.array(heads.config.accuracies)
        assert table.shape == (2, 10)
        assert table[0, 0] == pytest.approx(training.acceptance[0], abs=1e-4)
        assert (table.sum(1) <= 1).all()
    else:
        small = open_checkpoint(str(tmp_path / "out"))
        assert small.config.num_hidden_layers == 1
        assert read_tokenizer(small).record == read_tokenizer(open_checkpoint(str(checkpoint()))).record
        kept = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(kept, hf_model().model.embed_tokens.weight.half())


def test_a_seed_decides_every_bit(tmp_path: Path) -> None:
    made = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(options("eagle", tmp_path / name, steps=6, seed=seed))
        made[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert made["a"] == made["b"]
    assert made["a"] != made["c"]


def test_a_run_that_was_killed_ends_with_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specdec.train.cli", "eagle", str(checkpoint()), "--data",
               str(shared_data()), "--steps", "40", "--step-tokens", "400", "--draft-vocab", "100", "--taps", "1",
               "--learning-rate", "5e-3", "--checkpoint-minutes", "0", "--quiet", "-o"]  # fmt: skip
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with subprocess.Popen([*command, str(broken)], env={**os.environ, "OMP_NUM_THREADS": "1"}) as running:
        while not (broken / CHECKPOINT).exists() or load_state(broken / CHECKPOINT, State)[0].step < 10:
            assert running.poll() is None
            time.sleep(0.02)
        os.kill(running.pid, signal.SIGKILL)
    assert not (broken / TRAINING).exists()
    heard: list[str] = []

    class Ear(TrainProgress):
        def note(self, text: str) -> None:
            heard.append(text)

    train(options("eagle", broken), Ear())
    (said,) = heard
    assert "going on from step" in said
    train(options("eagle", whole))
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    first, second = (json.loads((folder / TRAINING).read_text()) for folder in (broken, whole))
    for training in (first, second):
        del training["seconds"]
    assert first == second


def test_a_training_can_begin_with_a_drafter(tmp_path: Path) -> None:
    """It begins as good as that one was, and keeps its taps, its draft vocabulary and an embedding of its own."""
    first = train(options("eagle", tmp_path / "first"))
    config = open_checkpoint(str(checkpoint())).config
    read, state = read_eagle(tmp_path / "first", config)
    own = {**state, EMBEDDING: hf_model().model.embed_tokens.weight.half() + 1}
    write_eagle(tmp_path / "own", read, own)
    fixed: dict[str, Any] = {"taps": None, "draft_vocab": None, "steps": 1}
    for name in ("first", "own"):
        again = train(options("eagle", tmp_path / f"{name}-again", init=tmp_path / name, learning_rate=1e-9, **fixed))
        kept, now = read_eagle(tmp_path / f"{name}-again", config)
        assert (kept.taps, kept.draft_vocab_size) == (("1",), 100)
        assert torch.equal(now["d2t"], state["d2t"])
        assert torch.equal(now["lm_head.weight"], state["lm_head.weight"])
        assert (EMBEDDING in now) == (name == "own")
        same = (again.history[0].tau, again.history[0].held_out_loss) == pytest.approx((first.tau, first.held_out_loss))
        assert same == (name == "first")  # with another embedding it is another drafter
        assert len(again.options["init"]) == 64
    assert torch.equal(now[EMBEDDING], own[EMBEDDING])
    longer = train(options("eagle", tmp_path / "longer", init=tmp_path / "first", **{**fixed, "steps": 40}))
    assert longer.held_out_loss < first.held_out_loss


# What is learned


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_the_sum_of_its_rows(method: str) -> None:
    learner = learners()[method]
    rows = list(Data(shared_data()).rows("train"))[:5]
    alone = [batch_of([row], method) for row in rows]
    together = batch_of(rows, method)
    assert positions(rows) == int(together.pairs(0, 0).sum())
    with torch.no_grad():
        assert float(learner.loss(together)) == pytest.approx(sum(float(learner.loss(one)) for one in alone), rel=1e-5)
        assert torch.equal(learner.right(together), torch.cat([learner.right(one) for one in alone]))


def test_chains_in_training_are_those_that_are_drafted_one_by_one() -> None:
    """Literally: pairs up to s from the target's states, each later one from what the one before it left."""
    learner = learners()["eagle"]
    assert isinstance(learner, EagleLearner)
    row = next(Data(shared_data()).rows("train"))
    batch, model = batch_of([row], "eagle"), learner.model
    with torch.no_grad():
        left = learner._steps(batch, 4)
        tokens, features = batch.tokens[:, 1:], batch.features[:, :-1, :48]
        model.set_attn_implementation("eager")
        for start in (0, 3, 9):
            fed, own = torch.zeros_like(features), torch.zeros_like(features)
            fed[:, : start + 1] = model.fc(features[:, : start + 1])
            for k in range(4):
                size = start + 1 + k
                embedded, joined = model.embed_tokens(tokens[:, :size]), (fed + own)[:, :size]
                turned = model.rotary_emb(embedded, torch.arange(size)[None])
                mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
                states = model.midlayer(embedded, joined, position_embeddings=turned, attention_mask=mask)
                assert (states[0, -1] - left[k][0, start + k]).abs().max() < 1e-5
                own[:, size] = states[:, -1]


def test_the_scale_of_a_channel_changes_nothing_that_eagle_learns() -> None:
    """What is large beside other channels is divided, so it drowns none of them."""
    config = eagle_config(hf_model().config, taps=("1",))
    batch = batch_of(list(Data(shared_data()).rows("train"))[:3], "eagle")
    lost: dict[float, list[float]] = {}
    for scale in (1.0, 4096.0):
        factors = torch.ones(batch.features.shape[-1])
        factors[5] = scale
        scaled = replace(batch, features=batch.features * factors)
        torch.manual_seed(0)
        learner = EagleLearner(config, target(), None, 1, factors[: config.tapped_size])
        optimizer = torch.optim.AdamW((p for p in learner.model.parameters() if p.requires_grad), lr=1e-2)
        lost[scale] = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = learner.loss(scaled)
            loss.backward()
            optimizer.step()
            lost[scale].append(float(loss.detach()))
    assert lost[1.0][-1] < 0.99 * lost[1.0][0], "it does learn"
    assert lost[4096.0] == pytest.approx(lost[1.0], rel=1e-4)


def test_the_spread_is_the_root_mean_square_of_a_channel() -> None:
    rows = [TextRow(np.arange(n), np.full((n, 3), value, np.float16), 1) for n, value in ((3, 2.0), (1, -4.0))]
    for row in rows:
        row.features[:, 1] = 0
    found = spread(rows, torch.tensor([2, 0, 1]))
    assert found.tolist() == pytest.approx([7**0.5, 7**0.5, 1e-3])


def certain_target(size: int = 48) -> Target:
    """A target whose state says the next token for certain: its head is the identity, times 30."""
    config = LlamaConfig(vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=4, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.lm_head.weight.copy_(30 * torch.eye(size))
    return Target(model, CPU)


def counting_row(size: int = 48) -> TextRow:
    """A text that counts modulo `size`; the state at a token is that of the next."""
    tokens = (np.arange(20) + 5) % size
    return TextRow(tokens, np.eye(size, dtype=np.float16)[(tokens + 1) % size], 6)


@pytest.mark.parametrize("off", [0, 1, -1])
def test_a_medusa_head_is_about_the_token_behind_the_pending_one(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = MedusaLearner(certain_target(), 3, None)
    batch = collate([counting_row()], torch.arange(48), CPU)
    monkeypatch.setattr(  # head i: as many tokens after the one that the state says
        learner.model, "forward", lambda x: torch.stack([30 * x.roll(1 + i + off, -1) for i in range(3)], -2)
    )
    assert bool(learner.right(batch).all()) == (off == 0)
    assert (float(learner.loss(batch).detach()) < 1e-3) == (off == 0)
    assert learner.right(batch).shape == (20 - 6 - 3, 3)


@pytest.mark.parametrize("off", [0, 1, -1])
def test_an_eagle_pair_is_about_the_token_behind_its_later_one(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = eagle_config(certain_target().config, taps=("1",))
    learner = EagleLearner(config, certain_target(), None, 2, torch.ones(48))
    batch = collate([counting_row()], torch.arange(48).repeat(2), CPU)
    monkeypatch.setattr(
        learner.model, "states", lambda tokens, *_, **__: torch.nn.functional.one_hot((tokens + 1 + off) % 48, 48)
    )
    monkeypatch.setattr(learner.model, "logits", lambda states: 30.0 * states)
    assert bool(learner.right(batch).all()) == (off == 0)
    assert (float(learner.loss(batch).detach()) < 1e-3) == (off == 0)
    assert learner.right(batch).shape == (20 - 6 - DEPTH, DEPTH)


def test_where_the_text_leaves_the_draft_vocabulary_nothing_is_learned() -> None:
    """Of a text that counts, heads without token 12 learn from one pair less, those without 0 from all."""
    batch = collate([counting_row()], torch.arange(48), CPU)
    lost = {}
    for gone in (0, 12):
        learner = MedusaLearner(certain_target(), 1, np.delete(np.arange(48), gone))
        learner.model.lm_head.weight.data.zero_()  # every token costs the same
        lost[gone] = float(learner.loss(batch).detach())
    assert lost[0] == pytest.approx(14 * np.log(47), rel=1e-5)
    assert lost[12] == pytest.approx(13 * np.log(47), rel=1e-5)


def test_a_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    rows = [TextRow(np.array(tokens), np.zeros((3, 1), np.float16), 1) for tokens in ([7, 7, 3], [9, 3, 5], [5, 2, 7])]
    assert vocabulary(rows, 3) == [3, 5, 7]
    assert vocabulary(rows, 4) == [2, 3, 5, 7]
    assert vocabulary(rows, 3, always=(12, 25)) == [3, 7, 12], "an end token is there though no row holds it"
    assert draft_vocabulary(rows, 20, 20) is None


def test_pruned_layers_are_the_targets_and_the_others_are_gone() -> None:
    tokens = torch.tensor([[5, 9, 11, 4]])
    model = hf_model()
    with torch.no_grad():
        state = model(tokens, output_hidden_states=True).hidden_states[1]
        assert torch.allclose(pruned(model, [0])(tokens).logits, model.lm_head(model.model.norm(state)), atol=1e-5)
    assert model.config.num_hidden_layers == 2
    assert choose_layers("0-3,28,29", None, 30) == (0, 1, 2, 3, 28, 29)
    assert choose_layers(None, 4, 30) == (0, 10, 19, 29)
    for layers, keep in (("0-2", None), ("1,0", None), ("0,7", None), ("x", None), (None, 3)):
        with pytest.raises(RequestError, match="layers"):
            choose_layers(layers, keep, 3)


# The loop


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    lengths = np.random.default_rng(0).integers(5, 400, 300).tolist()
    steps = epoch_steps(lengths, 2000, 1000, seed=0, epoch=0)
    assert sorted(row for step in steps for group in step for row in group) == list(range(300))
    padded = [[len(group) * max(lengths[row] for row in group) for group in step] for step in steps]
    assert max(size for step in padded for size in step) <= 1000
    assert max(sum(step) for step in padded) <= 2000
    assert sum(lengths) > 0.85 * sum(size for step in padded for size in step)
    assert steps == epoch_steps(lengths, 2000, 1000, seed=0, epoch=0)
    assert steps != epoch_steps(lengths, 2000, 1000, seed=0, epoch=1)
    assert steps != epoch_steps(lengths, 2000, 1000, seed=1, epoch=0)


def test_an_estimate_counts_a_token_only_behind_right_ones() -> None:
    figures = Figures()
    figures.add(torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.bool))
    figures.add(torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.bool))
    assert figures.tau == 1 + (3 + 2 + 1) / 4
    assert figures.acceptance == [3 / 4, 2 / 3, 1 / 2]


class Worsening:
    """A learner of one number, which is right until it has moved."""

    micro_tokens = 1000

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.begun = self.model.weight.detach().clone()

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.model.weight.sum() * (1 if torch.is_grad_enabled() else -1)  # learning makes estimates worse

    def right(self, batch: Batch) -> torch.Tensor:
        return (self.model.weight == self.begun).expand(4, 1)


def test_a_run_that_gets_no_better_ends_early_with_its_best_weights(tmp_path: Path) -> None:
    learner, rows = Worsening(), list(Data(shared_data()).rows("train"))
    schedule = Schedule(steps=100, minutes=1, learning_rate=0.1, step_tokens=100, seed=0, checkpoint_seconds=60)
    loop = Loop(learner, rows, rows[:1], torch.arange(1), schedule, tmp_path / CHECKPOINT, "", TrainProgress())
    history = loop.run()
    assert len(history) == 1 + PATIENCE
    assert loop.state.step == 5 * PATIENCE
    assert [estimate.tau for estimate in history] == [2.0] + [1.0] * PATIENCE
    assert torch.equal(learner.model.weight, learner.begun)


def test_estimates_take_a_small_share_of_a_run(tmp_path: Path) -> None:
    """Of texts of 200 tokens, after every 2,000 that are trained on; the last is always made."""
    learner, rows = Worsening(), list(Data(shared_data()).rows("train"))
    held_out = rows[:9]
    schedule = Schedule(steps=60, minutes=1, learning_rate=0.1, step_tokens=100, seed=0, checkpoint_seconds=60)
    loop = Loop(learner, rows, held_out, torch.arange(1), schedule, tmp_path / CHECKPOINT, "", TrainProgress())
    steps = [estimate.step for estimate in loop.run()]
    tokens = sum(len(row.tokens) for row in held_out)
    assert 150 < tokens < 250
    assert steps[0] == 0
    assert steps[-1] == 60
    assert min(after - before for before, after in pairwise(steps[:-1])) * 100 >= 10 * tokens
    assert len(steps) == 4


# What is refused


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").write_text("x")
    with pytest.raises(RequestError, match="no training of ours"):
        train(options("medusa", there))
    assert [path.name for path in there.iterdir()] == ["mine"]
    rows = list(Data(shared_data()).rows("train"))
    both = [*rows, *Data(shared_data()).rows("held-out")]
    for data, said in (
        (write_data(tmp_path / "taps", rows, taps=("2", "final")), "no hidden states at 1"),
        (write_data(tmp_path / "size", rows, hidden=32), "hidden size 32"),
        (write_data(tmp_path / "few", rows[:1]), "none that is held out"),
        (write_data(tmp_path / "strange", [replace(row, features=-row.features) for row in both]), "another target"),
    ):
        with pytest.raises(RequestError, match=said):
            train(options("eagle", tmp_path / "out", data=data, tokens=None))
    train(options("medusa", tmp_path / "done", steps=1))
    with pytest.raises(RequestError, match="--force"):
        train(options("medusa", tmp_path / "done", steps=1))
    train(options("medusa", tmp_path / "done", steps=1, force=True))
    with pytest.raises(SourceError, match="is no drafter"):
        train(options("eagle", tmp_path / "new", init=there, taps=None, draft_vocab=None))
    first = EagleConfig(
        llama=eagle_config(hf_model().config).llama, format="eagle", taps=("final",), draft_vocab_size=LOGITS_SIZE
    )
    write_eagle(tmp_path / "one", first, EagleModel(first).state_dict())
    with pytest.raises(RequestError, match="EAGLE-1's format"):
        train(options("eagle", tmp_path / "new", init=tmp_path / "one", taps=None, draft_vocab=None))
    assert not (tmp_path / "new").exists()


def test_data_that_is_enough_is_taken_as_it_is(tmp_path: Path) -> None:
    """It has a tap more than the heads read, and the tokens that are asked for: no target has to write any."""
    data = Path(shutil.copytree(shared_data(), tmp_path / "data"))
    training = train(options("medusa", tmp_path / "out", data=data, tokens=Data(data).tokens, steps=1))
    assert training.data.taps == TAPS
    assert sorted(path.name for path in data.iterdir()) == ["00000.safetensors", "data.json"]


def test_layers_of_a_gguf_are_distilled_like_any(tmp_path: Path) -> None:
    source = open_checkpoint(str(tiny_gguf(tmp_path / "tiny.gguf")))
    model: Any = source.load(torch.float32)
    learner = DistillLearner(pruned(model, [1]), Target(model, CPU), read_tokenizer(source), train_embeddings=False)
    learner.write(tmp_path / "small", ())
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert small.config.num_hidden_layers == 1
    kept, given = small.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(kept, given.half().float())


def test_a_checkpoint_of_another_run_is_not_gone_on_from(tmp_path: Path) -> None:
    learner, rows = Worsening(), [row for row in Data(shared_data()).rows("train") if learnable(row)]
    schedule = Schedule(steps=2, minutes=1, learning_rate=0.1, step_tokens=100, seed=0, checkpoint_seconds=0)
    path = tmp_path / CHECKPOINT
    Loop(learner, rows, rows[:2], torch.arange(1), schedule, path, "one", TrainProgress()).run()
    with pytest.raises(RequestError, match="other options or data"):
        Loop(learner, rows, rows[:2], torch.arange(1), schedule, path, "two", TrainProgress())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RequestError, match="--force trains anew"):
        Loop(learner, rows, rows[:2], torch.arange(1), schedule, path, "one", TrainProgress())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eagle", "m"], "-o/--output"),
        (["draft", "m", "-o", "d"], "invalid choice"),
        (["distill", "m", "-o", "d"], "--layers --keep"),
        (["medusa", "m", "-o", "d", "--taps", "1"], "unrecognized"),
        (["medusa", "m", "-o", "d", "--init", "d"], "unrecognized"),
        (["medusa", "m", "-o", "d", "--heads", "0"], "at least 1"),
        (["eagle", "m", "-o", "d", "--steps", "1", "--minutes", "1"], "not allowed"),
    ],
)
def test_wrong_usage_answers_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_options_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["--minutes", "0"],
        ["--taps", "last"],
        ["--self-fed", "-1"],
        ["--learning-rate", "0"],
        ["--init", "d", "--draft-vocab", "9"],
    ):
        assert cli.main(["eagle", "no/where", "-o", "out", *wrong]) == 2
        assert capsys.readouterr().err.startswith("specdec-train: error: ")


def test_help_and_mistakes_need_no_torch() -> None:
    code = (
        "import sys; from specdec.train import cli; cli.build_parser().format_help(); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_reports_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    arguments = ["medusa", str(checkpoint()), "-o", str(output), "--data", str(shared_data()), "--steps", "2"]
    assert cli.main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["output"] == str(output)
    assert report["steps"] == 2
    assert "training" in printed.err

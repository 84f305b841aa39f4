"""Processes of peers: the drivers' own source over stand-ins for the libraries, and how their end is reported."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from specdec.engines.errors import EngineError, EngineUnavailableError
from specdec.tools.peers import (
    DRIVERS,
    LLAMA_CPP,
    LOOP,
    OPENVINO,
    ORT_GENAI,
    PLAIN,
    TRANSFORMERS,
    Answer,
    Driver,
    Peer,
    add_peer_options,
    open_peer_set,
)
from support.bundles import shared_bundle
from support.fake_peers import (
    END,
    VERSIONS,
    checkpoint_folder,
    genai_folder,
    gguf_file,
    greedy,
    logits_after,
    openvino_folder,
    peer_python,
)

VOCAB = 11
MAKE = {
    "transformers": checkpoint_folder,
    "ort-genai": genai_folder,
    "llama-cpp": gguf_file,
    "openvino": openvino_folder,
}
# What the prompt's pass gives and what a pass gives then, where a stand-in speculates.
WIDE = {TRANSFORMERS.name: (1, 2), OPENVINO.name: (1, 2)}


def model_of(driver: Driver, folder: Path, vocab: int = VOCAB, threads: int = 1) -> Path:
    return MAKE[driver.name](folder, vocab, threads)


@pytest.fixture(params=DRIVERS.values(), ids=lambda driver: driver.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    return request.param


@pytest.fixture
def peer(driver: Driver, tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(driver, peer_python(tmp_path), model_of(driver, tmp_path), 1)
    yield peer
    peer.close()


def prompt_before(place: int, count: int) -> list[int]:
    """A prompt after which the end token is the greedy one at `place`, and at no earlier one, of `count`."""
    for token in range(1, VOCAB):
        for length in range(1, 40):
            if END in (found := greedy([token] * length, VOCAB, count)) and found.index(END) == place:
                return [token] * length
    raise AssertionError("the stand-in's formula has no such prompt")


def test_greedy_tokens_and_the_time_of_all_but_the_first(peer: Peer) -> None:
    """The stand-in's clock counts passes: the prompt's is not timed."""
    assert peer.version == VERSIONS[peer.driver.name]
    for prompt, count in (([1, 2], 5), ([4], 1), ([1, 2], 5)):
        expected = greedy(prompt, VOCAB, count)
        assert END not in expected[:-1]
        assert peer.generate(prompt, count) == Answer(expected, count - 1)


def test_every_mode_makes_the_tokens_and_tells_what_its_passes_took(driver: Driver, tmp_path: Path) -> None:
    model = model_of(driver, tmp_path)
    peer = Peer(driver, peer_python(tmp_path), model, 1, draft=model)
    expected = greedy([1, 2], VOCAB, 6)
    assert next(iter(driver.all_modes)) == PLAIN
    assert peer.in_mode(PLAIN).generate([1, 2], 6) == peer.generate([1, 2], 6)
    for mode in driver.all_modes:
        other = peer.in_mode(mode)
        assert (other.name, other.version) == (f"{driver.name}:{mode}", peer.version)
        answer = other.generate([1, 2], 6)
        assert answer.token_ids == expected
        if mode.startswith(PLAIN) or driver.name not in WIDE:
            assert (answer.first, answer.decoded, answer.seconds) == (1, 5, 5)
        elif driver is TRANSFORMERS and mode == "assisted":
            assert (answer.first, answer.decoded, answer.seconds) == (2, 4, 2)  # two of the prompt's pass, then 2 + 2
        else:
            assert (answer.first, answer.decoded, answer.seconds) == (1, 5, 3)  # 2 + 2 + 1
    assert peer.name == driver.name
    peer.close()


def test_an_end_token_does_not_end_an_answer(peer: Peer) -> None:
    prompt = prompt_before(2, 6)
    answer = peer.generate(prompt, 6)
    assert len(answer.token_ids) == 6
    assert answer.seconds == 5
    assert answer.token_ids[:2] == greedy(prompt, VOCAB, 2)
    # onnxruntime-genai keeps end tokens from being chosen, the others do not know that they are any.
    assert (answer.token_ids[2] == END) == (peer.driver is not ORT_GENAI)
    last = prompt_before(3, 4)
    answer = peer.generate(last, 4)
    assert answer.token_ids[:3] == greedy(last, VOCAB, 4)[:3]
    assert (len(answer.token_ids), answer.token_ids[3] == END) == (4, peer.driver is not ORT_GENAI)


def test_scores_are_the_logits_after_every_token(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for tokens in ([3, 1, 4, 1, 5], [9], [2, 6, 5]):
        logits = peer.score(tokens)
        assert logits.dtype == np.float32
        assert np.array_equal(logits, [logits_after(tokens[: end + 1], VOCAB) for end in range(len(tokens))])
    assert list(folder.iterdir()) == []


def test_decoding_and_scoring_in_turns_at_any_length(peer: Peer) -> None:
    long = [7] * 300
    assert peer.generate([1, 2], 4).token_ids == greedy([1, 2], VOCAB, 4)
    assert np.array_equal(peer.score(long)[-1], logits_after(long, VOCAB))
    assert peer.generate([1] * 254, 4).seconds == 3  # beyond the context that it had
    assert peer.generate(long, 2).token_ids == greedy(long, VOCAB, 2)
    assert peer.score([5]).shape == (1, VOCAB)


def test_the_size_is_that_of_graphs_and_weights(driver: Driver, tmp_path: Path) -> None:
    model = model_of(driver, tmp_path)
    peer = Peer(driver, peer_python(tmp_path), model, 1)
    first = len('{"vocab": 11, "threads": 1}')
    assert peer.size == first + (1000 if driver in (ORT_GENAI, OPENVINO) else 0)
    peer.close()


def test_threads_are_passed_on(driver: Driver, tmp_path: Path) -> None:
    model = model_of(driver, tmp_path, threads=3)
    with pytest.raises(EngineError, match=rf"^{driver.title} has ended: AssertionError: 2$"):
        Peer(driver, peer_python(tmp_path), model, 2)
    Peer(driver, peer_python(tmp_path), model, 3).close()


def test_a_peer_that_ends_is_an_error_with_its_last_line(peer: Peer) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match=rf"^{peer.driver.title} has ended: ValueError: no such token$"):
            peer.generate([VOCAB], 3)
    with pytest.raises(EngineError, match=rf"^{peer.driver.title} has ended: ValueError: no such token$"):
        peer.score([1])
    other = peer.in_mode(list(peer.driver.modes)[-1])
    other.restart()
    assert peer.generate([1, 2], 3).token_ids == other.generate([1, 2], 3).token_ids == greedy([1, 2], VOCAB, 3)


def test_logits_of_other_positions_are_an_error(tmp_path: Path) -> None:
    source = LLAMA_CPP.source.replace("llm.scores[:len(tokens)]", "llm.scores[len(tokens) - 1:len(tokens)]")
    last_only = Driver("llama-cpp", "llama.cpp", source)
    peer = Peer(last_only, peer_python(tmp_path), gguf_file(tmp_path), 1)
    with pytest.raises(EngineError, match=r"^llama.cpp gives logits of shape \(1, 11\) for 3 tokens: "):
        peer.score([1, 2, 3])
    peer.close()


def test_a_python_without_the_package_is_an_error_that_says_what_to_give(driver: Driver) -> None:
    package = {"ort-genai": "onnxruntime_genai", "llama-cpp": "llama_cpp", "openvino": "openvino"}.get(driver.name)
    if package is None:
        pytest.skip("this Python has transformers")
    message = rf"^{driver.title} has ended: ModuleNotFoundError: No module named '{package}'; give a Python that has it"
    with pytest.raises(EngineUnavailableError, match=rf"{message}, {sys.executable} does not$"):
        Peer(driver, sys.executable, Path("model"), 1)


def test_a_missing_python_is_an_error(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match=r"/none cannot be started: No such file or directory$"):
        Peer(driver, str(tmp_path / "none"), Path("model"), 1)


def test_a_driver_is_python(driver: Driver) -> None:
    compile(driver.source + LOOP, driver.name, "exec")
    compile(driver.converter, driver.name, "exec")
    assert all("==" in requirement for requirement in driver.requirements)


SMALL = """
import json, sys, time
import numpy
version = "1"

def generate(prompt, count):
    if prompt == [1]:
        time.sleep(600)
    return [7] * (count - 1), 1, 1.0

def score(tokens):
    return None
"""


def test_too_few_tokens_no_logits_and_no_answer_in_time() -> None:
    peer = Peer(Driver("small", "Small", SMALL), sys.executable, Path("model"), 1)
    with pytest.raises(EngineError, match=r"^Small made 2 tokens where 3 were asked for$"):
        peer.generate([2], 3)
    assert peer.score([1, 2]) is None
    peer.close()
    late = Peer(Driver("small", "Small", SMALL), sys.executable, Path("model"), 1, seconds=20)
    late._process._seconds = 0.1
    with pytest.raises(EngineError, match=r"^Small gave no answer within 0.1 s and was ended$"):
        late.generate([1], 3)
    late.close()


def test_options_open_the_peers_that_were_asked_for(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_peer_options(parser)
    python, folder, file = peer_python(tmp_path), genai_folder(tmp_path), gguf_file(tmp_path)
    genai = ["--ort-genai", str(folder), "--ort-genai-python", python]
    llama = ["--llama-cpp", str(file), "--llama-cpp-python", python]
    for options, names in (
        ([], []),
        (llama, ["llama-cpp"]),
        (llama + genai, ["ort-genai", "llama-cpp"]),
    ):
        with ExitStack() as stack:
            peers = open_peer_set(parser.parse_args(options), 1, stack, shared_bundle()).peers
            assert [peer.driver.name for peer in peers] == names
            assert [peer.model for peer in peers] == [{"ort-genai": folder, "llama-cpp": file}[name] for name in names]
        for peer in peers:
            with pytest.raises(ValueError, match="closed file"):
                peer.generate([1], 1)

"""Peers of one comparison: environments and models that are made once, what fails on the way, and the options."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.engines.errors import EngineUnavailableError, RequestError
from specdec.tools.peers import Driver, PeerSet, add_peer_options, open_peer_set
from specdec.tools.peers.__main__ import main
from specdec.tools.peers.conversion import converted
from specdec.tools.peers.environments import environment_python, peers_dir
from specdec.tools.peers.registry import asked_peers
from specdec.tools.peers.report import PeerFailure
from support.bundles import shared_bundle
from support.fake_engine import FakeEngine, fake_spec

VOCAB = 11

# Plays `python -m venv` and pip; what it installs is written beside the environment it is in.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *broken*) echo "ERROR: No matching distribution found for broken==1" >&2; echo "[notice] upgrade" >&2; exit 1 ;;
  *) echo "$@" > "$(dirname "$0")/../installed" ;;
esac
"""

SOURCE = """
import json, sys, time
import numpy
version = "1.5"
kind = open(sys.argv[1]).read()
if kind == "unreadable":
    sys.exit("cannot read the model")

def generate(prompt, count, crash=False, token=7):
    if crash and prompt[0] == 9:
        print("Traceback (most recent call last):", file=sys.stderr)
        sys.exit("the mode fails")
    return [token] * count, 1, 2.0

def score(tokens):
    if kind == "silent":
        return None
    if kind == "mute":
        sys.exit("no logits today")
    return numpy.tile(numpy.arange(11.0), (len(tokens), 1))
"""
CONVERTER = """
import os, sys
source, place, precision = sys.argv[1:]
if precision == "int4":
    sys.exit("a line\\nno such precision after all")
if precision == "int8":
    os.mkdir(place)
    with open(os.path.join(place, "model.gguf"), "w") as file, open(source) as known:
        file.write(known.read())
    with open(source + ".count", "a") as count:
        count.write("1")
"""
SMALL = Driver(
    "small",
    "Small",
    SOURCE,
    requirements=("small==1",),
    converter=CONVERTER,
    precisions=("int8", "int4", "fp32"),
    reads_gguf=True,
    reads_folders=False,
    modes={"plain": {}, "lookup": {"crash": True}, "other": {"token": 8}},
    draft_modes={"assisted": {}},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    python = tmp_path / "fake-python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return python


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are the tests' own Python."""

    def python(name: str, requirements: tuple[str, ...], tell: object) -> str:
        if name == "missing":
            raise EngineUnavailableError("cannot install missing: ERROR: No matching distribution found for missing==1")
        return sys.executable

    monkeypatch.setattr("specdec.tools.peers.peer_set.environment_python", python)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def model(folder: Path, kind: str = "good") -> Path:
    path = folder / f"{kind}.gguf"
    path.write_text(kind)
    return path


def test_an_environment_is_made_once_of_what_is_pinned(fake_python: Path, cache: Path) -> None:
    told: list[str] = []
    python = environment_python("small", ["a==1", "b==2"], told.append)
    assert told == ["small: installing a==1, b==2"]
    assert python.parents[2] == cache / "peers" / "environments"
    assert (python.parents[1] / "installed").read_text().strip().endswith("--disable-pip-version-check a==1 b==2")
    assert environment_python("small", ["a==1", "b==2"], told.append) == python
    assert len(told) == 1
    assert environment_python("small", ["a==1", "b==3"], told.append) != python


def test_an_environment_that_cannot_be_made_says_what_pip_said_and_leaves_nothing(fake_python: Path) -> None:
    with pytest.raises(EngineUnavailableError) as failure:
        environment_python("small", ["broken==1"])
    assert str(failure.value) == "cannot install small: ERROR: No matching distribution found for broken==1"
    assert list((peers_dir() / "environments").iterdir()) == []


def test_a_model_is_converted_once_for_each_source_and_precision(tmp_path: Path, cache: Path) -> None:
    source, told = model(tmp_path), []
    first = converted(SMALL, sys.executable, source, "int8", told.append)
    assert first == converted(SMALL, sys.executable, source, "int8", told.append)
    assert first.read_text() == "good"
    assert first.parents[1] == cache / "peers" / "models"
    assert first.parent.name.startswith("good-small-int8-")
    assert told == ["Small: converting good.gguf (int8)"]
    source.write_text("another")
    assert converted(SMALL, sys.executable, source, "int8").read_text() == "another"
    assert (tmp_path / "good.gguf.count").read_text() == "11"
    plain = replace(SMALL, converter="")
    assert converted(plain, sys.executable, source, "int8") == source


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp8", "Small is not run in fp8; only in int8, int4, fp32"),
        ("int4", "Small cannot convert good.gguf to int4: no such precision after all"),
        ("fp32", "Small cannot convert good.gguf to fp32: it wrote nothing"),
    ],
)
def test_a_conversion_that_fails_says_why_and_leaves_nothing(tmp_path: Path, precision: str, message: str) -> None:
    with pytest.raises(EngineUnavailableError) as failure:
        converted(SMALL, sys.executable, model(tmp_path), precision)
    assert str(failure.value) == message
    models = peers_dir() / "models"
    assert not models.exists() or list(models.iterdir()) == []


def test_sources_that_a_peer_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match=r"^Small is given GGUF files here; give one with --peer-model$"):
        converted(SMALL, sys.executable, tmp_path, "int8")
    with pytest.raises(RequestError, match=r"/none is neither a .gguf file nor a folder: give the checkpoint with "):
        converted(SMALL, sys.executable, tmp_path / "none", "int8")


def test_a_mode_that_ends_is_left_out_and_the_others_go_on(no_pip: None, tmp_path: Path, stack: ExitStack) -> None:
    told: list[str] = []
    peers = PeerSet("int8", 1, stack, told.append)
    peers.add(SMALL, model(tmp_path))
    peers.add(replace(SMALL, name="missing"), model(tmp_path))
    peers.add(replace(SMALL, name="unreadable", title="Other"), model(tmp_path, "unreadable"))
    assert [peer.name for peer in peers.peers] == ["small:plain", "small:lookup", "small:other"]
    runs = [run for question in (3, 9, 4) for run in peers.run(question, [question], 5)]
    assert [(run.question_id, run.mode) for run in runs] == [
        *((3, "lookup"), (3, "other"), (3, "plain")),
        *((9, "other"), (9, "plain")),  # "lookup" was between them
        *((4, "other"), (4, "plain")),
    ]
    assert all((run.decoded, run.seconds) == (4, 2.0) for run in runs)
    install = "cannot install missing: ERROR: No matching distribution found for missing==1"
    assert peers.failures == [
        PeerFailure(peer="missing", mode="", message=install),
        PeerFailure(peer="unreadable", mode="", message="Other has ended: cannot read the model"),
        PeerFailure(peer="small", mode="lookup", message="Small has ended: the mode fails"),
    ]
    assert told[-1] == "small:lookup is left out: Small has ended: the mode fails"
    small, missing, unreadable = peers.report(runs, {3: (7,) * 9, 9: (7,) * 9, 4: (8,) * 9})
    assert (small.version, small.size, small.best) == ("1.5", 4, "plain")
    assert [(each.mode, each.prompts, each.identical_to_plain, each.identical_to_ours) for each in small.modes] == [
        ("plain", 3, None, 2),
        ("lookup", 1, 1, 1),
        ("other", 3, 0, 1),
    ]
    assert small.modes[1].failure == "Small has ended: the mode fails"
    assert (missing.failure, missing.modes, missing.best) == (install, [], None)
    assert unreadable.failure == "Other has ended: cannot read the model"


def test_a_peer_that_does_not_start_again_is_left_out(no_pip: None, tmp_path: Path, stack: ExitStack) -> None:
    peers = PeerSet("int8", 1, stack, lambda line: None)
    peers.add(SMALL, model(tmp_path))
    [copy] = {peer.model for peer in peers.peers}
    copy.write_text("unreadable")
    assert [run.mode for run in peers.run(9, [9], 5)] == []
    assert peers.peers == []
    assert [(each.mode, each.message) for each in peers.failures] == [
        ("lookup", "Small has ended: the mode fails"),
        ("", "Small has ended: cannot read the model"),
    ]
    assert peers.run(4, [4], 5) == []


def test_damage_stands_beside_each_peer(no_pip: None, tmp_path: Path, stack: ExitStack) -> None:
    peers = PeerSet("int8", 1, stack, lambda line: None)
    for kind in ("good", "silent", "mute"):
        peers.add(replace(SMALL, name=kind), model(tmp_path, kind))
    peers.compare(FakeEngine(fake_spec(VOCAB)), [[1, 2, 3], [4, 5]])
    good, silent, mute = peers.report([])
    assert good.damage is not None
    assert good.damage.tokens == 3
    assert np.isclose(good.damage.perplexity, np.exp(-np.mean([tail - np.logaddexp.reduce(np.arange(11.0))
                                                                for tail in (2, 3, 5)])))  # fmt: skip
    assert (silent.damage, silent.damage_failure) == (None, None)
    assert (mute.damage, mute.damage_failure) == (None, "Small has ended: no logits today")
    assert [peer.driver.name for peer in peers.peers] == ["good"] * 3 + ["silent"] * 3 + ["mute"] * 3  # it is restarted


def test_modes_with_a_draft_model(no_pip: None, tmp_path: Path, stack: ExitStack) -> None:
    peers = PeerSet("int8", 1, stack, lambda line: None)
    with pytest.raises(RequestError, match=r"^small:assisted needs a draft model: give one with --peer-draft$"):
        peers.add(SMALL, model(tmp_path), modes=("assisted",))
    peers.add(SMALL, model(tmp_path), draft=model(tmp_path, "silent"), modes=("assisted", "plain"))
    assert [peer.mode for peer in peers.peers] == ["assisted", "plain"]
    assert [run.mode for run in peers.run(1, [1], 3)] == ["plain", "assisted"]


def test_peers_and_modes_by_name() -> None:
    assert asked_peers("ort-genai") == {"ort-genai": ()}
    assert asked_peers("llama-cpp:plain+lookup-3, openvino") == {"llama-cpp": ("plain", "lookup-3"), "openvino": ()}
    for text, message in (
        ("vllm", "there is no peer 'vllm'; known: transformers, ort-genai, llama-cpp, openvino"),
        ("llama-cpp:fast", "llama-cpp has no mode 'fast'; known: plain, lookup-3, lookup-10"),
        ("openvino,openvino", "openvino is named twice"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as failure:
            asked_peers(text)
        assert str(failure.value) == message


def test_options_set_up_what_is_asked_for(
    no_pip: None, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(SMALL, precisions=("fp32",), converter="")
    monkeypatch.setattr(
        "specdec.tools.peers.registry.DRIVERS", {"small": small, "missing": replace(small, name="missing")}
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    add_peer_options(parser)
    base = [str(shared_bundle()), "--peers", "missing,small:plain+other"]
    with pytest.raises(RequestError, match=r"^--peers needs --peer-model: "):
        open_peer_set(parser.parse_args(base), 1, stack, shared_bundle())
    none = parser.parse_args([*base, "--peer-model", str(tmp_path / "none")])
    with pytest.raises(RequestError, match=r"/none is neither a .gguf file nor a folder: give the checkpoint with "):
        open_peer_set(none, 1, stack, none.bundle)
    capsys.readouterr()
    args = parser.parse_args([*base, "--peer-model", str(model(tmp_path))])
    peers = open_peer_set(args, 1, stack, args.bundle)
    assert peers.precision == "fp32"
    assert [(peer.name, peer.generate([1], 2).token_ids) for peer in peers.peers] == [
        ("small:plain", (7, 7)),
        ("small:other", (8, 8)),
    ]
    assert capsys.readouterr().err.startswith("missing is left out: cannot install missing: ERROR: ")


def test_a_cache_that_cannot_be_written_is_that_peers_failure(
    no_pip: None, tmp_path: Path, cache: Path, stack: ExitStack
) -> None:
    cache.write_text("not a folder")
    peers = PeerSet("int8", 1, stack, lambda line: None)
    peers.add(SMALL, model(tmp_path))
    [failure] = peers.failures
    assert (failure.peer, failure.mode) == ("small", "")
    assert "Not a directory" in failure.message


def test_the_command_prints_a_line_for_each_mode_and_writes_what_it_ran(
    no_pip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(SMALL, precisions=("fp32",), converter="", source=SOURCE.replace("11.0", "400.0"))
    missing = replace(small, name="missing")
    monkeypatch.setattr("specdec.tools.peers.registry.DRIVERS", {"small": small, "missing": missing})
    lines = [json.dumps({"question_id": n, "category": "qa", "turns": [f"fox {n}"]}) for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    bundle, written = str(shared_bundle()), tmp_path / "peers.json"
    options = ["--peer-model", str(model(tmp_path)), "--prompts", str(tmp_path / "prompts.jsonl"), "--limit", "2"]
    options += ["--max-new-tokens", "5", "--threads", "1", "--json", str(written), "--reference", bundle]
    capsys.readouterr()
    assert main([bundle, "--peers", "small:plain+other,missing", *options]) == 0
    head, plain, other, note = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["peer", "version", "mode", "tokens/s"]
    assert plain.split()[:4] == ["small", "fp32", "1.5", "plain"]
    assert other.split()[:4] == ["small", "fp32", "1.5", "other"]
    assert "0/2" in other
    assert note.startswith("missing: cannot install missing: ERROR: ")
    report = json.loads(written.read_text())
    assert [(run["mode"], run["question_id"]) for run in report["runs"]] == [
        *(("other", 0), ("plain", 0)),
        *(("plain", 1), ("other", 1)),
    ]
    assert report["peers"][0]["damage"]["tokens"] > 2
    assert main([bundle, "--peers", "missing", *options]) == 1
    for wrong in (["--peer-model", "x"], ["--peers", "vllm"], ["--peers", "small", "--reference", bundle]):
        with pytest.raises(SystemExit) as end:
            main([bundle, *wrong])
        assert end.value.code == 2

"""What a precision costs: the arithmetic on distributions that can be worked out by hand, and the whole tool."""

import json
import math
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from specdec.engines.damage import (
    Damage,
    Tally,
    compare_engines,
    kl_divergence,
    log_softmax,
    measure_damage,
    teacher_forced,
)
from specdec.engines.errors import EngineError, RequestError
from specdec.engines.manifest import MANIFEST_NAME, encode, file_record, read_manifest
from specdec.engines.scoring import score
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from specdec.tools.damage import NOTE, damages, main, peer_costs
from specdec.tools.pairs import Subject, subjects
from specdec.tools.peers import LLAMA_CPP, ORT_GENAI, Peer
from support.bundles import far_bundle, shared_bundle, shared_checkpoint
from support.fake_engine import FakeEngine, fake_spec
from support.fake_peers import genai_folder, gguf_file, logits_after, peer_python

TEXTS = [[1, 2, 3, 4, 5, 6, 7, 1, 2], [3], [7, 7], [5, 1, 4]]
PREDICTED = 8 + 0 + 1 + 2


def logits_of(*rows: Sequence[float]) -> np.ndarray:
    """Logits [n, V] that stand for these probabilities, each row moved by a constant."""
    return np.stack([np.log(row) + shift for shift, row in enumerate(rows, 3)]).astype(np.float32)


def test_kl_by_hand() -> None:
    half, quarter = map(log_softmax, np.log([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]) + 7)
    assert half.dtype == np.float64
    assert np.exp(half) == pytest.approx([0.5, 0.25, 0.25], abs=1e-15)
    assert kl_divergence(half, quarter) == pytest.approx(math.log(2) / 4, abs=1e-15)
    skewed = np.log([0.75, 0.125, 0.125])
    assert kl_divergence(half, skewed) == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-15)
    assert kl_divergence(skewed, half) == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2), abs=1e-15)
    assert kl_divergence(skewed, skewed) == 0.0


def test_log_softmax_takes_any_finite_logits() -> None:
    assert log_softmax(np.array([3e38, 3e38, -3e38], np.float32))[:2].tolist() == [-math.log(2)] * 2
    assert log_softmax(np.array([60000, 60000], np.float16)).tolist() == [-math.log(2)] * 2


def test_figures_by_hand() -> None:
    reference = logits_of([0.5, 0.25, 0.25], [0.125, 0.125, 0.75], [0.25, 0.5, 0.25])
    found = logits_of([0.25, 0.5, 0.25], [0.125, 0.125, 0.75], [0.25, 0.5, 0.25])
    tally = Tally()
    tally.add(reference[:2], found[:2], [1, 0])
    tally.add(reference[2:], found[2:], [2])
    damage = tally.damage
    assert (damage.top1_agreement, damage.tokens) == (2 / 3, 3)
    assert damage.mean_kl == pytest.approx(math.log(2) / 12, abs=1e-6)
    assert damage.perplexity == pytest.approx((2 * 8 * 4) ** (1 / 3), rel=1e-6)
    assert damage.reference_perplexity == pytest.approx((4 * 8 * 4) ** (1 / 3), rel=1e-6)


def test_the_record_is_json() -> None:
    tally = Tally()
    tally.add(np.zeros((1, 2), np.float32), np.array([[3e38, -3e38]], np.float32), [1])
    damage = tally.damage
    assert msgspec.json.decode(msgspec.json.encode(damage), type=Damage) == damage
    assert damage.reference_perplexity == 2.0
    assert damage.perplexity == math.exp(700)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"mean_kl": 1.0}', type=Damage)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_no_numbers(broken: float) -> None:
    good, bad = np.zeros((1, 3), np.float32), np.array([[0, broken, 0]], np.float32)
    for reference, found in ((good, bad), (bad, good)):
        with pytest.raises(EngineError, match=r"logits are not numbers: .*; try another precision"):
            Tally().add(reference, found, [0])


@pytest.mark.parametrize(("reference", "found"), [((2, 3), (2, 4)), ((1, 3), (2, 3)), ((3, 3), (3, 3))])
def test_shapes_that_differ(reference: tuple[int, int], found: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="against"):
        Tally().add(np.zeros(reference), np.zeros(found), [0, 0])


def test_an_engine_has_no_damage_to_itself() -> None:
    engine = FakeEngine(fake_spec(8, logits_size=11), prefilling=True)
    (damage,) = compare_engines(engine, [engine], TEXTS)
    assert (damage.mean_kl, damage.top1_agreement, damage.tokens) == (0.0, 1.0, PREDICTED)
    assert damage.perplexity == damage.reference_perplexity


def reference_texts(engine: FakeEngine) -> Iterator[tuple[list[int], np.ndarray]]:
    for text in TEXTS:
        (logits,) = score(engine, engine.allocate(1, 16), [text], [3])
        yield text, logits[:-1, : engine.spec.vocab_size]


def test_damage_is_that_of_each_position_however_a_text_is_cut() -> None:
    """Computed anew from the logits after each beginning of a text; padding of the vocabulary does not count."""
    one, two = (FakeEngine(fake_spec(8, logits_size=11), seed=seed) for seed in (1, 2))
    kl, agreed, nats, reference_nats = [], [], [], []
    for text in TEXTS:
        for at in range(1, len(text)):
            p, q = (log_softmax(engine.logits_after(text[:at])[:8]) for engine in (one, two))
            kl.append((np.exp(p) * (p - q)).sum())
            agreed.append(p.argmax() == q.argmax())
            nats.append(-q[text[at]])
            reference_nats.append(-p[text[at]])
    for width in (2, 3, 8, 32):
        two.widths.clear()
        (damage,) = compare_engines(one, [two], TEXTS, width=width)
        assert damage.mean_kl == pytest.approx(np.mean(kl), rel=1e-12)
        assert damage.top1_agreement == np.mean(agreed)
        assert damage.perplexity == pytest.approx(np.exp(np.mean(nats)), rel=1e-12)
        assert damage.reference_perplexity == pytest.approx(np.exp(np.mean(reference_nats)), rel=1e-12)
        assert max(two.widths) == min(width, 8)
        assert measure_damage(two, reference_texts(one), width=width) == damage


def test_log_probabilities_will_do_as_a_reference() -> None:
    one, two = (FakeEngine(fake_spec(8), seed=seed) for seed in (1, 2))
    logits = measure_damage(two, reference_texts(one))
    normalized = measure_damage(two, ((text, np.stack(list(map(log_softmax, rows))) if len(rows) else rows)
                                      for text, rows in reference_texts(one)))  # fmt: skip
    assert normalized.mean_kl == pytest.approx(logits.mean_kl, rel=1e-12)
    assert normalized.perplexity == pytest.approx(logits.perplexity, rel=1e-12)


def test_a_reference_is_dropped_before_the_next_one_is_made() -> None:
    made: list[weakref.ref[np.ndarray]] = []

    def reference() -> np.ndarray:
        assert all(each() is None for each in made)
        array = np.zeros((2, 8), np.float32)
        made.append(weakref.ref(array))
        return array

    measure_damage(FakeEngine(fake_spec(8)), (([1, 2, 3], reference()) for _ in range(3)))
    assert len(made) == 3


def test_texts_that_cannot_be_compared() -> None:
    engine = FakeEngine(fake_spec(8, max_length=8))
    with pytest.raises(RequestError, match="nothing to compare: no text has two tokens"):
        compare_engines(engine, [engine], [[1], []])
    with pytest.raises(RequestError, match="a text of 9 tokens is beyond the model's 8"):
        list(teacher_forced(engine, TEXTS[0], 4))
    with pytest.raises(ValueError, match="a reference of 3 positions for a text of 3 tokens"):
        measure_damage(engine, [([1, 2, 3], np.zeros((3, 8)))])


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared bundle's model in fp16, drafting for itself."""
    bundle = tmp_path_factory.mktemp("damage") / "fp16"
    checkpoint = str(shared_checkpoint())
    export_bundle(ExportOptions(model=checkpoint, output=bundle, drafters=(f"model:{checkpoint}",), precision="fp16"))
    return bundle


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    texts = ["the quick brown fox", "one, two, three", "def add(a, b):"]
    path.write_text(
        "".join(json.dumps({"question_id": text, "category": "x", "turns": [text]}) + "\n" for text in texts)
    )
    return path


def test_the_whole_tool(fp16: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, unlike = shared_bundle(), far_bundle()
    capsys.readouterr()  # what the exports printed
    options = ["--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "8", "--threads", "1", "--seed", "3"]
    arguments = [str(fp16), str(unlike), "--reference", str(reference), *options]
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    report = json.loads(printed.out)
    assert (report["reference"], report["texts"], report["seed"], report["note"]) == (str(reference), 2, 3, NOTE)

    engines = {(Path(each["bundle"]), each["role"], each["precision"]): each for each in report["engines"]}
    own, half, far = (reference, "fp32"), (fp16, "fp16"), (unlike, "fp32")
    assert [(bundle, precision, role) for bundle, role, precision in engines] == [
        (*own, "target"), (*own, "draft"), (*half, "target"), (*half, "draft"), (*far, "draft")
    ]  # fmt: skip  # the far bundle's target is the reference's own
    damage = {key: each["damage"] for key, each in engines.items()}
    same = damage[reference, "target", "fp32"]
    assert (same["mean_kl"], same["top1_agreement"]) == (0.0, 1.0)
    assert same["perplexity"] == same["reference_perplexity"]
    assert damage[reference, "draft", "fp32"] == same
    slight, other = damage[fp16, "target", "fp16"], damage[unlike, "draft", "fp32"]
    assert 0 < slight["mean_kl"] < 1e-3 < 0.1 < other["mean_kl"]
    assert len({each["tokens"] for each in damage.values()}) == 1
    assert len({each["reference_perplexity"] for each in damage.values()}) == 1
    assert all(len(each["pass_costs"]) == 14 for each in engines.values())
    graphs = {(reference, "target"): "target/fp32", (fp16, "draft"): "target/fp16", (unlike, "draft"): "drafter/fp32"}
    for (bundle, role), folder in graphs.items():
        files = [bundle / folder / name for name in ("model.onnx", "model.onnx.data")]
        size = sum(path.stat().st_size for path in files)
        assert engines[bundle, role, Path(folder).name]["size"] == size
    assert engines[fp16, "target", "fp16"]["size"] < 0.8 * engines[reference, "target", "fp32"]["size"]

    pairs = {(each["target"], each["draft"], each["temperature"]): each for each in report["pairs"]}
    names = [f"{bundle} {precision}" for bundle, precision in (own, half, far)]
    assert list(pairs) == [(target, draft, t) for target in names[:2] for draft in names for t in (0.0, 1.0)]
    assert all(each["prompts"] == 2 and each["tokens"] > 0 for each in pairs.values())
    for target in names[:2]:
        assert pairs[target, names[0], 0.0]["acceptance_rate"] > 0.9  # the same model, but for its precision
        assert pairs[target, names[2], 0.0]["acceptance_rate"] < 0.5  # another one
        # Whatever drafts, a greedy target says the same.
        assert len({pairs[target, draft, 0.0]["tokens"] for draft in names}) == 1
    for temperature in (0.0, 1.0):
        itself = pairs[names[0], names[0], temperature]
        assert itself["mode"] == "exact"
        assert itself["acceptance_rate"] == 1.0
        assert itself["mean_accepted_length"] > 3

    assert main([*arguments, "--no-pairs", "--no-pass-costs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["bundle", "model", "precision", "MB", "KL", "(nats)", "top-1", "perplexity", "in",
                                "fp32", "tokens"]  # fmt: skip
    assert lines[1].split()[:6] == [str(reference), "target", "fp32", lines[1].split()[3], "0.0000", "100.0%"]
    assert lines[6:] == ["", *NOTE.splitlines()]


def test_the_tables_of_the_tool(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(shared_bundle())
    options = ["--prompts", str(prompts), "--limit", "1", "--max-new-tokens", "4", "--threads", "1"]
    capsys.readouterr()
    assert main([bundle, "--reference", bundle, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ms/pass of 1  ms/pass of 4")
    assert lines[4].split() == ["target", "draft", "T", "mode", "prompts", "tokens", "accepted", "τ"]
    assert lines[5].split() == [bundle, "fp32", bundle, "fp32", "0", "exact", "1", "4", "100.0%", lines[5].split()[-1]]
    assert len(lines) == 3 + 1 + 3 + 1 + 2


def test_damage_of_peers_is_that_of_each_position(tmp_path: Path) -> None:
    """Computed anew from both sides' logits after each beginning of a text; padding of a vocabulary does not count."""
    engine, tally = FakeEngine(fake_spec(8, logits_size=9)), Tally()
    for text in TEXTS:
        for at in range(1, len(text)):
            tally.add(engine.logits_after(text[:at])[None, :8], logits_after(text[:at], 11)[None, :8], [text[at]])
    with ExitStack() as stack:
        models = [(ORT_GENAI, genai_folder(tmp_path)), (LLAMA_CPP, gguf_file(tmp_path))]
        python = peer_python(tmp_path)
        peers = [stack.enter_context(closing(Peer(driver, python, model, 1))) for driver, model in models]
        for width in (2, 32):
            costs = peer_costs(peers, engine, TEXTS, width)
            assert [(cost.bundle, cost.role) for cost in costs] == [
                (str(models[0][1]), "ort-genai 9.9"), (str(models[1][1]), "llama-cpp 8.8")
            ]  # fmt: skip
            for cost in costs:
                assert cost.damage is not None
                assert msgspec.structs.astuple(cost.damage) == pytest.approx(msgspec.structs.astuple(tally.damage))
                assert cost.damage.mean_kl > 0.1
        assert peer_costs([], engine, TEXTS, 32) == []
        with pytest.raises(RequestError, match=r"model-11\.gguf has a vocabulary of 11, the reference one of 12: "):
            peer_costs(peers[1:], FakeEngine(fake_spec(12)), TEXTS, 32)


def test_peers_in_the_tool(tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, python = str(shared_bundle()), peer_python(tmp_path)
    folder, file = genai_folder(tmp_path, 400), gguf_file(tmp_path, 400)
    arguments = [bundle, "--reference", bundle, "--prompts", str(prompts), "--limit", "1", "--threads", "1"]
    arguments += ["--no-pairs", "--llama-cpp", str(file), "--llama-cpp-python", python]
    capsys.readouterr()
    assert main([*arguments, "--ort-genai", str(folder), "--ort-genai-python", python, "--json"]) == 0
    *_, draft, genai, llama = json.loads(capsys.readouterr().out)["engines"]
    for each, model, role in ((genai, folder, "ort-genai 9.9"), (llama, file, "llama-cpp 8.8")):
        assert (each["bundle"], each["role"], each["precision"]) == (str(model), role, None)
        assert each["pass_costs"] == []
        assert each["damage"] == genai["damage"]
        assert each["damage"]["tokens"] == draft["damage"]["tokens"]
        assert each["damage"]["reference_perplexity"] == pytest.approx(draft["damage"]["perplexity"])
    assert llama["size"] == file.stat().st_size
    assert genai["size"] == (folder / "model.onnx").stat().st_size + 1000

    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ms/pass of 1  ms/pass of 4")
    assert lines[3].split()[:4] == [str(file), "llama-cpp", "8.8", "-"]
    assert lines[3].split()[-2:] == ["-", "-"]
    assert lines[4:] == ["", *NOTE.splitlines()]


def altered(bundle: Path, to: Path) -> Path:
    """A copy whose tokenizer is another file."""
    shutil.copytree(bundle, to)
    (to / "tokenizer.json").write_bytes((to / "tokenizer.json").read_bytes() + b"\n")
    manifest = read_manifest(to)
    files = manifest.files | {"tokenizer.json": file_record(to / "tokenizer.json")}
    (to / MANIFEST_NAME).write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    return to


def test_errors_of_the_tool(fp16: Path, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, empty = str(shared_bundle()), tmp_path / "empty.jsonl"
    empty.write_text("")
    cases = [
        ([good, "--reference", str(fp16)], "has no target in fp32: export one with --precision fp32"),
        ([str(shared_bundle("gpt2")), "--reference", good], "is of another model than"),
        ([str(shared_bundle("mistral")), "--reference", good], "is of another model than"),  # of the same shape
        ([str(altered(fp16, tmp_path / "altered")), "--reference", good], "has another tokenizer than"),
        ([good, "--reference", good, "--prompts", str(empty)], "holds no prompt"),
        ([good, "--reference", good, "--prompts", str(prompts), "--max-tokens", "1"], "no text has two tokens"),
    ]
    capsys.readouterr()
    for arguments, message in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        main([good, "--reference", good, "--limit", "0"])
    assert "argument --limit: '0' is not a whole number of at least 1" in capsys.readouterr().err


def test_a_draft_without_an_equal_in_the_reference_is_left_out() -> None:
    """Its engine is not even opened."""
    target, draft = subjects([shared_bundle()])
    other = file_record(Path(__file__))
    files = draft.manifest.files | {"other": other, "other.data": other}
    model = msgspec.structs.replace(draft.model, spec=msgspec.structs.replace(draft.model.spec, num_layers=1))
    variant = msgspec.structs.replace(draft.variant, graph="other", precision="int4")
    manifest = msgspec.structs.replace(draft.manifest, files=files)
    smaller = replace(draft, manifest=manifest, model=model, variant=variant)

    def opened(subject: Subject) -> FakeEngine:
        assert subject is target
        return FakeEngine(fake_spec(8))

    assert list(damages(target.bundle, [target, smaller], opened, [[1, 2, 3]])) == [target.content]

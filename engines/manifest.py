"""The bundle's manifest, `specdec.json`: what a bundle holds, what was measured on it, and the SHA-256 of every file.

Written last by the exporter and read first by the runtime; the two meet only here and in the contract. Reading is
strict: unknown fields, other schema or contract versions, missing and damaged files are errors. This module knows
files and fields; it loads no engine and no tokenizer.
Length: the records.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec

from specdec.engines.contract import CONTRACT_VERSION, HeadsSpec, ModelSpec
from specdec.engines.damage import Damage
from specdec.engines.errors import BundleError

SCHEMA_VERSION = 1
MANIFEST_NAME = "specdec.json"
NGRAM = "ngram"
MEDUSA, BLOCKWISE = "medusa", "blockwise"  # two methods of one drafter

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the manifest's records: immutable, unknown fields refused."""


class FileRecord(_Record, frozen=True):
    """One file of the bundle."""

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]


class Parity(_Record, frozen=True):
    """Largest logit difference to PyTorch over `positions` scored positions, and the tolerance that was applied."""

    max_abs_error: float
    tolerance: float
    positions: int


class Invariance(_Record, frozen=True):
    """Result of the bitwise invariance gate: `exact` when every scoring gave the same bits.

    `least_width`: narrowest pass that gives them; 2 where passes of one token take other kernels, whose logits are off
    by up to `one_token_max_abs_diff`.
    """

    exact: bool
    least_width: Literal[1, 2]
    scorings: int
    one_token_max_abs_diff: float


class Plan(_Record, frozen=True):
    """One engine file compiled from a variant's graph, for one library and some GPU architectures ("sm89").

    A pass takes the profile `prefill` (one row of up to `prefill_width` tokens) or `verify` (up to `max_batch` rows of
    up to `verify_width`), with logits at up to `verify_width` positions in either; every row has `capacity` slots.
    `inputs`: type of every input of the engine by name, as numpy spells it. `library`: version of the library that
    made it, which has to be the version that runs it.
    """

    backend: Literal["tensorrt", "tensorrt-rtx"]
    library: str
    architectures: Annotated[list[str], msgspec.Meta(min_length=1)]
    file: str
    max_batch: _Count
    prefill_width: _Count
    verify_width: _Count
    capacity: _Count
    inputs: dict[str, str]


class Variant(_Record, frozen=True):
    """One precision of one model: its graph, what was measured on it, and what was compiled from it.

    `damage`: what quantization costs, against the checkpoint in float32 on the prompts of `engines/prompts` (None: it
    is not quantized). `parity` is then that of the quantized weights, without the rounding of activations. Both gates
    of a bfloat16 graph are of its twin in float32, with the same weights. `plans`: by backend and architectures, as in
    "tensorrt-rtx-sm89".
    """

    graph: str
    precision: str
    parity: Parity
    invariance: Invariance
    damage: Damage | None = None
    plans: dict[str, Plan] = {}


class Model(_Record, frozen=True):
    """A target or draft model: its shape and its variants by name."""

    spec: ModelSpec
    variants: dict[str, Variant]


class NgramDrafter(_Record, frozen=True, tag=NGRAM, tag_field="method"):
    """Prompt lookup; needs no model."""


class ModelDrafter(_Record, frozen=True, tag="model", tag_field="method"):
    """A draft model with its own cache. `shared_vocab`: ids below it mean the same string in both models."""

    model: Model
    shared_vocab: _Count


class LayerSkipDrafter(_Record, frozen=True, tag="layerskip", tag_field="method"):
    """The target's first layers (`model.spec.num_layers` of them), its final norm and its head.

    A variant is cut out of the target's variant of the same name: its graph reads that one's data file, and the
    target's cache.
    """

    model: Model


class MedusaDrafter(_Record, frozen=True, tag=MEDUSA, tag_field="method"):
    """Medusa heads on the target's last hidden state: a graph of their own.

    `ids`: file of the target's ids [logits_size] that the logits are of, in NumPy's format; None: all, in order.
    `precision`: of the weights. `accuracies` [heads][ranks]: share of positions at which a head's candidate of this
    rank is the right token, as measured in training; empty if it was not.
    """

    spec: HeadsSpec
    graph: str
    precision: str
    parity: Parity
    ids: str | None = None
    accuracies: list[list[float]] = []


class EagleDrafter(_Record, frozen=True, tag="eagle", tag_field="method"):
    """One layer over pairs of a token and the hidden state before it, with a cache of its own.

    A variant lies beside the target's variant of the same name and reads embedding and head from that one's data file.
    `taps`: hidden states of the target that its features are made of, in their order. `ids`: a file with the target's
    id of each of its logits (int64, ascending); None: they are the target's own.
    """

    model: Model
    taps: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    ids: str | None = None


Drafter = NgramDrafter | ModelDrafter | LayerSkipDrafter | MedusaDrafter | EagleDrafter
BESIDE = (LayerSkipDrafter, EagleDrafter)  # whose variants are named as the target's


class Tokenizer(_Record, frozen=True):
    """What the runtime needs beside `tokenizer.json` and `chat_template.jinja`.

    `special_tokens` are the strings that the chat template may name (`bos_token`, `eos_token`, ...).
    """

    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    has_chat_template: bool


class Limits(_Record, frozen=True):
    """Largest batch (rows), length (tokens of a row) and tree (nodes of a chunk) that the bundle's engines take."""

    max_batch: _Count
    max_length: _Count
    max_tree: _Count


class Source(_Record, frozen=True):
    """Where the weights came from: a name and a format, no path of the exporting machine."""

    name: str
    format: Literal["safetensors", "gguf"]
    family: str


class Manifest(_Record, frozen=True):
    """Everything in `specdec.json`."""

    schema_version: int
    contract_version: int
    source: Source
    tokenizer: Tokenizer
    target: Model
    drafters: dict[str, Drafter]
    limits: Limits
    tools: dict[str, str]
    files: dict[str, FileRecord]

    def methods(self) -> list[str]:
        """How the bundle can draft: its drafters, and `blockwise`, which takes the Medusa heads' best tokens only."""
        return [*self.drafters, *([BLOCKWISE] if MEDUSA in self.drafters else [])]

    def models(self) -> Iterator[tuple[str, Model]]:
        """Yield what each model is called in reports, and the model: `target`, `draft`, `layerskip:8`, `eagle`."""
        yield "target", self.target
        for method, drafter in self.drafters.items():
            if not isinstance(drafter, NgramDrafter | MedusaDrafter):  # heads are no model
                yield "draft" if method == "model" else method, drafter.model


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON, keys in declaration order, files sorted by name."""
    ordered = msgspec.structs.replace(manifest, files=dict(sorted(manifest.files.items())))
    return msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n"


def file_record(path: Path) -> FileRecord:
    """Hash one file (SHA-256, FIPS 180-4)."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(sha256=digest, bytes=path.stat().st_size)


def read_manifest(bundle: Path) -> Manifest:
    """Read and check `bundle/specdec.json`; the files it lists are not touched.

    Raises `BundleError` when the bundle or its manifest is missing, malformed or of another version.
    """
    path = bundle / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise BundleError(f"{bundle} is not a bundle: no {MANIFEST_NAME} (make one with specdec-export)") from exc
    except OSError as exc:
        raise BundleError(f"{path} cannot be read: {exc.strerror}") from exc
    _check_versions(path, raw)
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as exc:
        raise BundleError(
            f"{path} is damaged or not a manifest of this version: {exc}; export the bundle again"
        ) from exc
    for name in manifest.files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise BundleError(f"{path} lists {name!r}, which lies outside the bundle; do not use this bundle")
    for method, drafter in manifest.drafters.items():
        if isinstance(drafter, BESIDE) and list(drafter.model.variants) != list(manifest.target.variants):
            raise BundleError(f"{path}: drafter {method} has other variants than the target; export the bundle again")
        if isinstance(drafter, MedusaDrafter) and (
            "final" not in manifest.target.spec.taps or drafter.spec.hidden_size != manifest.target.spec.hidden_size
        ):
            raise BundleError(f"{path}: drafter {method} reads hidden states that the target lacks; export it again")
        if isinstance(drafter, EagleDrafter) and not set(drafter.taps) <= set(manifest.target.spec.taps):
            raise BundleError(f"{path}: drafter {method} reads taps that the target lacks; export the bundle again")
    for name in _needed(manifest):
        if name not in manifest.files:
            raise BundleError(f"{path} needs {name} and does not list it; export the bundle again")
    return manifest


def verify_files(bundle: Path, manifest: Manifest, prefix: str = "") -> None:
    """Compare size and SHA-256 of every listed file whose name starts with `prefix`; raise `BundleError` on the first.

    Reads the files once (about a second per GB).
    """
    for name, expected in manifest.files.items():
        if not name.startswith(prefix):
            continue
        path = bundle / name
        if not path.is_file():
            raise BundleError(f"{bundle} is incomplete: {name} is missing; export or copy the bundle again")
        size = path.stat().st_size
        if size != expected.bytes:
            raise BundleError(f"{path} is damaged: {size} bytes instead of {expected.bytes}; export or copy it again")
        if file_record(path).sha256 != expected.sha256:
            raise BundleError(f"{path} is damaged: its SHA-256 is not the manifest's; export or copy the bundle again")


def _needed(manifest: Manifest) -> Iterator[str]:
    """Files that the runtime opens: what is not listed is not verified, and so not opened."""
    yield "tokenizer.json"
    if manifest.tokenizer.has_chat_template:
        yield "chat_template.jinja"
    for name, model in manifest.models():
        for variant in model.variants.values():
            yield variant.graph
            if not isinstance(manifest.drafters.get(name), LayerSkipDrafter):  # its data file is the target's
                yield f"{variant.graph}.data"
            yield from (plan.file for plan in variant.plans.values())
    for drafter in manifest.drafters.values():
        if isinstance(drafter, MedusaDrafter):
            yield from (drafter.graph, f"{drafter.graph}.data", *([drafter.ids] if drafter.ids else []))
        if isinstance(drafter, EagleDrafter) and drafter.ids is not None:
            yield drafter.ids


def _check_versions(path: Path, raw: bytes) -> None:
    """Name the version that differs before complaining about fields that only another version has."""
    try:
        head = json.loads(raw)
    except ValueError as exc:
        raise BundleError(f"{path} is damaged: not JSON ({exc}); export or copy the bundle again") from exc
    if not isinstance(head, dict):
        raise BundleError(f"{path} is damaged: not a JSON object; export or copy the bundle again")
    for field, supported in (("schema_version", SCHEMA_VERSION), ("contract_version", CONTRACT_VERSION)):
        found = head.get(field)
        if found != supported:
            raise BundleError(
                f"{path}: {field} {found} is not supported (this specdec reads {supported}); export the bundle again"
            )

"""Engines of several bundles, and what a draft of one is worth to a target of another.

Bundles fix who drafts for whom; to pair engines across them, `pair_bundle` makes a folder that `LLM` takes for a bundle
of the two. This module knows bundles and counts: nothing of what a precision does to logits.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import msgspec

from specdec.engines.base import Engine
from specdec.engines.errors import RequestError
from specdec.engines.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Model,
    ModelDrafter,
    Variant,
    encode,
    read_manifest,
    verify_files,
)
from specdec.runtime import LLM, SamplingParams, SpeculativeConfig

Content = tuple[str, str]  # SHA-256 of a graph and of its weights
TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True, slots=True)
class Subject:
    """One engine of a bundle: a variant of its `TARGET`, or of its `DRAFT` model (`shared_vocab`: ids in common)."""

    bundle: Path
    manifest: Manifest
    role: str
    model: Model
    variant: Variant
    shared_vocab: int

    @property
    def name(self) -> str:
        """The bundle and the precision."""
        return f"{self.bundle} {self.variant.precision}"

    @property
    def content(self) -> Content:
        """The same for the same engine in another role or bundle."""
        files, graph = self.manifest.files, self.variant.graph
        return files[graph].sha256, files[f"{graph}.data"].sha256

    @property
    def size(self) -> int:
        """Bytes of the graph and of what lies beside it."""
        folder = PurePosixPath(self.variant.graph).parent
        return sum(record.bytes for name, record in self.manifest.files.items() if PurePosixPath(name).parent == folder)


Open = Callable[[Subject], Engine]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A draft engine for a target engine, over `prompts` answers of `tokens` tokens in all, at one temperature.

    `acceptance_rate`: accepted / proposed draft tokens. `mean_accepted_length`: τ, tokens per target pass.
    """

    target: str
    draft: str
    temperature: float
    mode: str
    prompts: int
    tokens: int
    acceptance_rate: float
    mean_accepted_length: float


def subjects(bundles: Sequence[Path]) -> list[Subject]:
    """Every variant of every target and draft model of `bundles`, equal ones of a role once; files are verified.

    Raises `BundleError` for a damaged bundle and `RequestError` for bundles whose tokenizers differ.
    """
    found: dict[object, Subject] = {}
    tokenizers: set[str] = set()
    for bundle in bundles:
        manifest = read_manifest(bundle)
        verify_files(bundle, manifest)
        tokenizers.add(manifest.files["tokenizer.json"].sha256)
        if len(tokenizers) > 1:
            raise RequestError(f"{bundle} has another tokenizer than {bundles[0]}: compare bundles of one model")
        models = [(TARGET, manifest.target, manifest.target.spec.vocab_size)]
        for record in manifest.drafters.values():
            if isinstance(record, ModelDrafter):
                models.append((DRAFT, record.model, record.shared_vocab))
        for role, model, shared in models:
            for variant in model.variants.values():
                subject = Subject(bundle, manifest, role, model, variant, shared)
                found.setdefault((role, subject.content), subject)
    return list(found.values())


def run_pair(
    target: Subject,
    draft: Subject,
    opened: Open,
    texts: Sequence[str],
    *,
    config: SpeculativeConfig,
    params: SamplingParams,
    temperatures: Sequence[float],
) -> list[Pair]:
    """Answer `texts` (user turns, one batch) with `draft` drafting for `target`, at each of `temperatures`.

    The n-th text is sampled with seed `params.seed` + n.
    """
    engines = {TARGET: opened(target), DRAFT: opened(draft)}
    with pair_bundle(target, draft) as folder:
        llm = LLM(folder, speculative=config, verify=False, opener=lambda graph, spec, _: engines[graph.name])
        prompts = [llm.text.encode_turn(text) for text in texts]
        seeds = [(params.seed or 0) + n for n in range(len(prompts))]
        pairs = []
        for temperature in temperatures:
            own = [replace(params, temperature=temperature, seed=seed) for seed in seeds]
            stats = [output.stats for output in llm.generate(prompts, own)]
            tokens, rounds = sum(each.new_tokens for each in stats), sum(each.rounds for each in stats)
            accepted = sum(each.draft_tokens_accepted for each in stats)
            proposed = sum(each.draft_tokens_proposed for each in stats)
            pairs.append(
                Pair(
                    target=target.name,
                    draft=draft.name,
                    temperature=temperature,
                    mode=llm.mode,
                    prompts=len(prompts),
                    tokens=tokens,
                    acceptance_rate=accepted / proposed if proposed else 0.0,
                    mean_accepted_length=tokens / rounds if rounds else 0.0,
                )
            )
    return pairs


@contextmanager
def pair_bundle(target: Subject, draft: Subject) -> Iterator[Path]:
    """A folder with a manifest of the two and no weights, for `LLM(..., verify=False, opener=...)`.

    The graphs are named `TARGET` and `DRAFT`, the drafter "model"; everything else is the target's.
    """
    graphs = [f"{role}{end}" for role in (TARGET, DRAFT) for end in ("", ".data")]
    manifest = msgspec.structs.replace(
        target.manifest,
        target=_alone(target, TARGET),
        drafters={"model": ModelDrafter(model=_alone(draft, DRAFT), shared_vocab=draft.shared_vocab)},
        files=target.manifest.files | dict.fromkeys(graphs, FileRecord(sha256="0" * 64, bytes=0)),
    )
    names = ["tokenizer.json", *(["chat_template.jinja"] if target.manifest.tokenizer.has_chat_template else [])]
    with TemporaryDirectory(prefix="specdec-pair-") as folder:
        for name in names:
            shutil.copyfile(target.bundle / name, Path(folder) / name)
        (Path(folder) / MANIFEST_NAME).write_bytes(encode(manifest))
        yield Path(folder)


def _alone(subject: Subject, graph: str) -> Model:
    variant = msgspec.structs.replace(subject.variant, graph=graph, plans={})
    return Model(spec=subject.model.spec, variants={variant.precision: variant})

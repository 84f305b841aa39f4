"""A folder that `LLM` takes for a bundle, without weights: its graphs are names for tables.

This module knows manifests; what the names stand for, whoever opens them knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from specdec.engines.manifest import (
    BESIDE,
    MANIFEST_NAME,
    EagleDrafter,
    FileRecord,
    Manifest,
    MedusaDrafter,
    Model,
    ModelDrafter,
    Variant,
    encode,
)

_TOKENIZER = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
"pre_tokenizer": null, "post_processor": null, "decoder": null,
"model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}"""


@contextmanager
def bundle_view(manifest: Manifest, variant: str, *, size: int | None, end: int, max_batch: int) -> Iterator[Path]:
    """A folder with the bundle's manifest and none of its weights, for `LLM(..., verify=False, opener=...)`.

    Its only variant is `variant`. Every draft model's graph is named `drafters/<method>`, apart from the target's even
    where a target drafts for itself. `size`: ids, all of them shared by target and draft; None: as in the bundle.
    `end`: the only end token. Texts come out empty: the folder's tokenizer knows no words.
    """
    target = _model(manifest.target, manifest.target.variants[variant], "target", size)
    drafters = dict(manifest.drafters)
    for method, record in drafters.items():
        if isinstance(record, ModelDrafter):
            own = _model(record.model, next(iter(record.model.variants.values())), f"drafters/{method}", size)
            shared = size or record.shared_vocab
            drafters[method] = msgspec.structs.replace(record, model=own, shared_vocab=shared)
        elif isinstance(record, BESIDE):
            own = _model(record.model, record.model.variants[variant], f"drafters/{method}", size)
            drafters[method] = msgspec.structs.replace(record, model=own)
            if isinstance(record, EagleDrafter):  # its table speaks the target's ids
                drafters[method] = msgspec.structs.replace(record, model=own, ids=None)
        elif isinstance(record, MedusaDrafter):  # so does that of the heads
            shape = msgspec.structs.replace(record.spec, logits_size=target.spec.vocab_size)
            drafters[method] = msgspec.structs.replace(record, spec=shape, graph=f"drafters/{method}", ids=None)
    made = msgspec.structs.replace(
        manifest,
        target=target,
        drafters=drafters,
        limits=msgspec.structs.replace(manifest.limits, max_batch=max_batch),
        tokenizer=msgspec.structs.replace(manifest.tokenizer, has_chat_template=False, eos_token_ids=[end]),
    )
    files = {name: FileRecord(sha256="0" * 64, bytes=0) for name in _files(made)}
    with TemporaryDirectory(prefix="specdec-verify-") as folder:
        (Path(folder) / MANIFEST_NAME).write_bytes(encode(msgspec.structs.replace(made, files=files)))
        (Path(folder) / "tokenizer.json").write_text(_TOKENIZER, encoding="utf-8")
        yield Path(folder)


def _model(model: Model, variant: Variant, graph: str, size: int | None) -> Model:
    size = size or model.spec.vocab_size
    return Model(
        spec=msgspec.structs.replace(model.spec, vocab_size=size, logits_size=size),
        variants={"table": msgspec.structs.replace(variant, graph=graph)},
    )


def _files(manifest: Manifest) -> Iterator[str]:
    yield "tokenizer.json"
    for _, model in manifest.models():
        for variant in model.variants.values():
            yield variant.graph
            yield f"{variant.graph}.data"
    for record in manifest.drafters.values():
        if isinstance(record, MedusaDrafter):
            yield from (record.graph, f"{record.graph}.data")

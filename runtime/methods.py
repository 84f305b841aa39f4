"""What `SpeculativeConfig.method` can name in a bundle, and what `auto` stands for. This module knows names alone."""

from specdec.engines.manifest import MEDUSA, NGRAM, Manifest

PREFERRED = ("eagle", MEDUSA, "model", "layerskip")  # of a bundle's drafters, by `auto`: docs/performance.md


def known_methods(manifest: Manifest) -> list[str]:
    """What `SpeculativeConfig.method` may name: how the bundle can draft, and n-grams before any other of these."""
    known = manifest.methods()
    return known + [f"{NGRAM}+{other}" for other in known if NGRAM in known and other != NGRAM]


def auto_method(manifest: Manifest) -> str | None:
    """What `auto` stands for: n-grams, if the bundle has them, and the preferred one of its other drafters."""
    others = sorted(manifest.drafters.keys() - {NGRAM}, key=lambda name: (PREFERRED.index(name.split(":")[0]), name))
    return "+".join([*([NGRAM] if NGRAM in manifest.drafters else []), *others[:1]]) or None

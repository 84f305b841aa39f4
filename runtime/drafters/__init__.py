"""Drafters: what proposes token trees for the target to verify."""

NGRAM_TOKENS = 7
# Least chance of a further n-gram token, by the target's precision: products of 8 and 4 bits are bound by arithmetic
# from the second position on, so it costs them more (docs/performance.md, "How wide to draft").
NGRAM_THRESHOLD = 0.15
NGRAM_THRESHOLDS = {"int8": 0.3, "int4": 0.3}
MODEL_TOKENS = 4
TREE_TOKENS = 8
# Least confidence below which EAGLE's chains go on where nobody says how long they are; it knows how sure it is
# (docs/performance.md, "Trained drafters").
EAGLE_THRESHOLD = 0.6
EAGLE_THRESHOLDS = {"int8": 0.9, "int4": 0.9}
SURE_MATCH = 2  # tokens that an n-gram match has at least to go before another drafter's guess

"""Drafters: what proposes token trees for the target to verify."""

NGRAM_TOKENS = 7
# Least chance of a further n-gram token, by the target's precision: products of 8 and 4 bits are bound by arithmetic
# from the second position on, so it costs them more (docs/performance.md, "How wide to draft").
NGRAM_THRESHOLD = 0.15
NGRAM_THRESHOLDS = {"int8": 0.3, "int4": 0.3}
MODEL_TOKENS = 4
TREE_TOKENS = 8
SURE_MATCH = 2  # tokens that an n-gram match has at least to go before another drafter's guess

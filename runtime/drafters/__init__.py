"""Drafters: what proposes token trees for the target to verify."""

NGRAM_TOKENS = 7
MODEL_TOKENS = 4
TREE_TOKENS = 8

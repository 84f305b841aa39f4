"""Drafters: what proposes token trees for the target to verify."""

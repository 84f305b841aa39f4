"""Training of drafters: what the target writes, and what its layers hold while it does."""

"""The runtime: drafting, verification and emission, on NumPy and one engine library."""

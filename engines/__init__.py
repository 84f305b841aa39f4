"""Engines: a graph in, tensors out. Nothing here knows of speculation."""

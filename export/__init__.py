"""Offline: a checkpoint becomes a bundle. The only package that may import torch, transformers and onnx."""

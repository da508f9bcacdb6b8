"""Tensors that move as a mapping says."""

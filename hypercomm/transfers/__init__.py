"""Transfers of tensors from one layout to another."""

"""Makes WORLD appear to be bound to a device on which its backend can be split."""

import torch

from hypercomm.process_groups.torch_internals import split as binding

CUDA = torch.device("cuda", 0)


def bind(monkeypatch, device=CUDA):
    """Make WORLD appear to be bound to a device for the duration of a test."""
    monkeypatch.setattr(binding, "split_device", lambda: device)
    monkeypatch.setattr(binding, "_can_split", lambda _device_type: True)

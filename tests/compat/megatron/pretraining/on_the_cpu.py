"""Makes Megatron run on a machine without CUDA, for `pretrain_small.py`."""

import torch
from torch.overrides import TorchFunctionMode

torch.cuda.current_device = torch.cpu.current_device
torch.cuda.current_stream = torch.cpu.current_stream


class OnTheCpu(TorchFunctionMode):
    """Replaces "cuda" by the CPU when a tensor is created or moved."""

    def __torch_function__(self, function, _, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

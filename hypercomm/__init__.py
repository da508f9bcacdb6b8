"""hypercomm: an object-oriented, N-dimensional communication grid for torch.distributed.

Names are imported on first access, so planning with `RankLayout` never loads torch. Errors are in
`hypercomm.errors`. `__init__.pyi` lists all names.
"""

from hypercomm import errors as errors
from hypercomm.lazy import attributes as _attributes
from hypercomm.version import __version__ as __version__

_ELSEWHERE = {
    "Mpu": "hypercomm.compat.deepspeed",
    "difference": "hypercomm.layout.difference",
    "given_ranks": "hypercomm.testing",
    "grad_norm": "hypercomm.training",
    "install": "hypercomm.compat.megatron",
    "layouts": "hypercomm.testing",
    "parallel_state": "hypercomm.compat.megatron",
    "simulate": "hypercomm.testing",
    **dict.fromkeys(errors.__all__, "hypercomm.errors"),
}
"""Maps each name that users may expect in this module to the module that defines it."""

__getattr__, __dir__, __all__ = _attributes(__name__, _ELSEWHERE)

# The modules that `__init__.py` imports on first access.

from hypercomm.compat import (
    deepspeed as deepspeed,
    ezpz as ezpz,
    megatron as megatron,
    torchtitan as torchtitan,
)

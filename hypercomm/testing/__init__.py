"""Fake and simulated worlds, real local ranks, and hypothesis strategies, for users' own tests.

The strategies need hypothesis, which the extra `testing` installs, but not torch. The other names
need torch. Names are imported on first use. `__init__.pyi` lists all names.
"""

from types import SimpleNamespace

from hypercomm.lazy import attributes

# `most` is pytest's --max-ranks, which excludes larger examples of `given_ranks`. `left_out` is the
# number of ranks of the smallest excluded example, or 0 if no example was excluded.
ranks_bound = SimpleNamespace(most=None, left_out=0)

__getattr__, __dir__, __all__ = attributes(__name__)

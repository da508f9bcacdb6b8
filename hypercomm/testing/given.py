"""Property tests on real ranks: hypothesis draws in this process, and the body runs on ranks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
from hypothesis.strategies import SearchStrategy

from hypercomm.errors import LaunchError
from hypercomm.launch.run import preloads
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.testing.on_ranks import most_ranks, run_body

preloads += ["hypothesis.strategies", __name__]


def given_ranks(
    *strategies: SearchStrategy[Any],
    ranks: int | None = None,
    ranks_max: int | None = None,
    max_examples: int = 20,
    timeout: float = 60.0,
    **named: SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of hypothesis whose body runs on real ranks, anew for each example.

    Hypothesis draws and shrinks in this process. For each example, the body runs on every rank of
    a job of its own, with the same arguments. The number of ranks is that of the largest layout
    drawn: by `layouts()`, by `grids()`, or either end of `mappings()`. A grid is built on each
    rank and destroyed after the body. The test fails with the traceback of the first rank that
    fails, or with the stacks of ranks that hang. It has no deadline and takes no `@settings`.

    The body may be a closure or a method; it and its arguments travel by cloudpickle. It cannot
    draw more (`data()`); `assume` works in it. A script calls such a test under
    `if __name__ == "__main__":`.

    Args:
        strategies: As for `hypothesis.given`: they draw the last arguments of the body.
        ranks: The number of ranks; default: that of the largest layout of an example.
        ranks_max: The most ranks of an example, above which the test fails; default: 4 for each
            processor, and at least 8, or pytest's `--ranks-max`. That option leaves out larger
            examples; a test without a smaller one is skipped.
        max_examples: The number of examples.
        timeout: The seconds that one example may take.
        named: As `strategies`, by the name of the argument; either these or those.

    Returns:
        A decorator for the body.

    Raises:
        LaunchError: In the test: an example needs too many ranks, or cannot travel.
        RankFailedError: In the test: a rank failed.

    Example:
        >>> from hypothesis import strategies as st
        >>> from hypercomm.testing import grids
        >>> @given_ranks(grids(max_ranks=4), st.integers(1, 9), max_examples=5)
        ... def test_mean(grid, number):
        ...     assert grid[grid.dim_names].mean(number) == number
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            drawn = signature.bind(*args, **kwargs).arguments
            needed = _ranks_of(drawn, function.__qualname__) if ranks is None else ranks
            plugin = sys.modules.get("hypercomm.testing.pytest_plugin")
            option = None if plugin is None else plugin.bound.most
            if plugin is not None and option is not None and needed > option:
                plugin.bound.left_out = min(needed, plugin.bound.left_out or needed)
                hypothesis.event(f"left out: more than --ranks-max={option} ranks")
                hypothesis.reject()
            most = ranks_max or option or most_ranks()
            if needed > most:
                raise LaunchError(
                    f"an example of {function.__qualname__} has {needed} ranks, more than {most}; "
                    f"draw smaller ones, as in layouts(max_ranks={most}, max_offset=0), or allow "
                    f"ranks_max={needed}"
                )
            run_body(function, drawn, needed, timeout=timeout)

        made: Callable[..., None] = hypothesis.given(*strategies, **named)(on_ranks)
        return hypothesis.settings(
            max_examples=max_examples,
            deadline=None,
            # Phase.explain looks at lines that run in this process: none of the body's.
            phases=[phase for phase in hypothesis.Phase if phase != hypothesis.Phase.explain],
            suppress_health_check=[
                hypothesis.HealthCheck.too_slow,
                hypothesis.HealthCheck.filter_too_much,  # by --ranks-max
            ],
        )(made)

    return decorated


def _ranks_of(drawn: Mapping[str, Any], test: str) -> int:
    """Return the number of ranks that the layouts among the arguments need, from 0 on."""
    layouts: list[RankLayout] = []
    for value in drawn.values():
        ends = (value.source, value.target) if isinstance(value, RankMapping) else (value,)
        layouts += [
            found for end in ends if isinstance(found := getattr(end, "layout", end), RankLayout)
        ]
    if not layouts:
        raise LaunchError(
            f"no argument of {test} says how many ranks it needs: {', '.join(drawn)}; draw a "
            f"layout, as from layouts(max_ranks=4, max_offset=0), or give ranks="
        )
    return max(max(layout.ranks) for layout in layouts) + 1

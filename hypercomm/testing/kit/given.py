"""Property tests on real ranks: hypothesis draws here, and the body runs there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hypercomm.errors import LaunchError
from hypercomm.launch.run import check_seconds, preloads
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.checks import positive
from hypercomm.layout.text import shown
from hypercomm.testing.kit import running
from hypercomm.testing.kit.bodies import body_of, packed
from hypercomm.testing.kit.bound import current

try:
    import hypothesis
    from hypothesis import HealthCheck, Phase, settings
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "given_ranks of hypercomm.testing needs hypothesis: pip install 'hypercomm[testing]'",
        name="hypothesis",
    ) from error

preloads += ["hypothesis.strategies", __name__, "hypercomm.testing.mapping_strategies"]

_EXAMPLE = "layouts(max_ranks=4, max_offset=0)"


def given_ranks(
    *strategies: hypothesis.strategies.SearchStrategy[Any],
    ranks: int | None = None,
    ranks_max: int | None = None,
    max_examples: int = 20,
    timeout: float = 60.0,
    **named: hypothesis.strategies.SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of hypothesis whose body runs on real ranks, anew for each example.

    Hypothesis draws and shrinks in this process; then each rank of a job of its own calls the body
    with what was drawn, so that all have the same. As many ranks start as the layout that is drawn
    needs: one of `layouts()`, the grid of `grids()`, both ends of `mappings()`. A grid is built on
    each rank, and destroyed behind the body. The first rank that fails, or the stacks where ranks
    hang, is what the test fails with. Nothing has a deadline but the ranks,
    and it takes no `@settings`.

    A body is a function at the top of a module, or a method, which has an object of its own on
    each rank; it, and what is drawn, travels by pickle. It cannot draw more (`data()`); `assume`
    works in it. A script calls such a test under `if __name__ == "__main__":`.

    Args:
        strategies: What is drawn, as for `hypothesis.given`: for the last arguments of the body.
        ranks: How many ranks there are; default: what the largest layout in an example needs.
        ranks_max: The most that an example may have; default: 4 for each processor, and at least
            8, or pytest's `--ranks-max`. Examples of more ranks than that option's do not start,
            whatever is given here; where no example is left, the test is skipped.
        max_examples: How many examples are drawn.
        timeout: Seconds that one example may take.
        named: What is drawn, by the name of the body's argument; either these or those.

    Raises:
        LaunchError: An argument cannot work; in the test, an example needs more ranks than may
            start, or cannot travel.
        RankFailedError: In the test: a rank failed.

    Example:
        >>> from hypothesis import strategies as st
        >>> from hypercomm.testing import grids
        >>> @given_ranks(grids(max_ranks=4), st.integers(1, 9), max_examples=5)
        ... def test_mean(grid, number):
        ...     assert grid[grid.dim_names].mean(number) == number
    """
    asked = None if ranks_max is None else positive(ranks_max, "ranks_max")
    count = None if ranks is None else positive(ranks, "ranks")
    positive(max_examples, "max_examples")
    check_seconds(timeout)
    if not strategies and not named:
        raise LaunchError(f"given_ranks needs a strategy, such as {_EXAMPLE}")
    if strategies and named:
        raise LaunchError(
            "given_ranks takes strategies by position or by name, as hypothesis.given does, "
            "not both"
        )
    for strategy in (*strategies, *named.values()):
        if not isinstance(strategy, hypothesis.strategies.SearchStrategy):
            raise LaunchError(
                f"given_ranks takes strategies, such as {_EXAMPLE}, got {shown(strategy)}"
            )

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        body = body_of(function, inner=True)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            drawn = dict(signature.bind(*args, **kwargs).arguments)
            first = next(iter(signature.parameters), "")
            if first in drawn and _is_method_of(drawn[first], body.qualname):
                del drawn[first]  # each rank has an object of its own
            needed = count or _ranks_of(drawn, body.qualname)
            bound = current.get()
            if bound is not None and not bound.lets(needed):
                return  # no reject(): hypothesis would fail a test of which it rejects most
            most = asked or (running.most_ranks() if bound is None else bound.limit)
            running.check_size(
                needed,
                most,
                f"an example of {body.qualname}",
                f"draw smaller ones, as in layouts(max_ranks={most}, max_offset=0), or allow "
                f"ranks_max={needed}",
            )
            arguments = packed(drawn, body.qualname)
            try:
                running.run_body(body, arguments, needed, timeout=timeout)
            except running.WishError as wished:
                running.grant(wished)

        on_ranks._hypercomm_body = function  # type: ignore[attr-defined]  # what a rank looks for
        made: Callable[..., None] = hypothesis.given(*strategies, **named)(on_ranks)
        limits = settings(
            max_examples=max_examples,
            deadline=None,  # ranks take as long as they take
            phases=[phase for phase in Phase if phase != Phase.explain],  # of lines that run here
            suppress_health_check=[HealthCheck.too_slow],
        )
        return limits(made)

    return decorated


def _is_method_of(value: object, qualname: str) -> bool:
    """Whether a function of that name is a method of an object."""
    owner, _, name = qualname.rpartition(".")
    return any(
        kind.__qualname__ == owner and not isinstance(kind.__dict__.get(name), staticmethod)
        for kind in type(value).__mro__
    )


def _ranks_of(drawn: Mapping[str, Any], test: str) -> int:
    """The ranks that the layouts among the arguments need: all from 0 on."""
    needed = [last + 1 for value in drawn.values() for last in _last_ranks(value)]
    if not needed:
        raise LaunchError(
            f"nothing that is drawn for {test} says how many ranks it needs: "
            f"{', '.join(drawn)}; draw a layout, as from {_EXAMPLE}, or give ranks="
        )
    return max(needed)


def _last_ranks(value: object) -> list[int]:
    if isinstance(value, RankMapping):
        return [max(value.source.ranks), max(value.target.ranks)]
    layout = value if isinstance(value, RankLayout) else getattr(value, "layout", None)
    return [max(layout.ranks)] if isinstance(layout, RankLayout) else []

"""The body of a test of pytest that is marked `ranks`, hypothesis's included."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hypercomm.testing.kit import running
from hypercomm.testing.kit.bodies import body_of, packed


def call(
    test: Callable[..., Any],
    fixtures: Mapping[str, Any],
    nprocs: int,
    *,
    timeout: float,
    backend: str,
    output: running.Output | None,
) -> None:
    """Run a test's body on real ranks; hypothesis's tests draw here, and run each example there.

    Args:
        test: The test, as pytest has found it.
        fixtures: The values of its fixtures, by name.
        nprocs: The number of ranks.
        timeout: Seconds until ranks that have not returned are ended.
        backend: As for `run_ranks`.
        output: Takes what ranks print.

    Raises:
        RanksFailedError: A rank failed.
        LaunchError: The body, or a fixture, cannot travel.
    """
    __tracebackhide__ = True
    options: dict[str, Any] = {"timeout": timeout, "backend": backend, "output": output}
    held = getattr(test, "hypothesis", None)
    if held is None:
        body = body_of(test)
        arguments = packed(fixtures, body.qualname, "fixture")
        _run(body, arguments, nprocs, options)
        return
    inner = held.inner_test
    body = body_of(inner, inner=True)
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def on_ranks(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        drawn = dict(signature.bind(*args, **kwargs).arguments)
        first = next(iter(signature.parameters), None)
        if inspect.ismethod(test) and first is not None:
            drawn.pop(first, None)  # each rank has an object of its own
        _run(body, packed(drawn, body.qualname), nprocs, options)

    held.inner_test = on_ranks  # what hypothesis documents for plugins like this one
    try:
        test(**fixtures)
    finally:
        held.inner_test = inner


def _run(body: Any, arguments: Mapping[str, bytes], nprocs: int, options: Any) -> None:
    __tracebackhide__ = True
    try:
        running.run_body(body, arguments, nprocs, **options)
    except running.WishError as wished:
        running.grant(wished)

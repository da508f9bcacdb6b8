"""Count the operations on the job's store that creating seven groups takes on each of 8 gloo ranks.

    python benchmarks/store.py

Ranks that arrive early poll for the others, so the smallest count is what a call needs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.process_groups.torch_internals import store
from hypercomm.process_groups.torch_internals.gloo import GlooStore
from hypercomm.testing import run_ranks

SEVEN = ["tp", "cp", "dp", ["tp", "cp"], ["cp", "dp"], ["tp", "dp"], ["tp", "cp", "dp"]]


class Counted:
    """A store that counts what is called."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.operations: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            self.operations[name] += name != "has_extended_api"  # asks nothing
            return method(*arguments)

        return call


def operations(*, lazily: bool) -> dict[str, int]:
    """Create seven groups in one batch, and then one more; return the operations of each call."""
    with HyperCommGrid("tp=2,cp=2,dp=2", lazy_init=lazily) as grid:
        grid.create_pg("tp", name="first")
        counted, found = Counted(store.store()), {}
        dist.barrier()
        init = GlooStore.__init__

        def counting(one: GlooStore, _: object, *arguments: Any) -> None:
            init(one, counted, *arguments)

        with (
            mock.patch.object(store, "store", return_value=counted),
            mock.patch.object(GlooStore, "__init__", counting),
        ):
            for title, create in (
                ("create_pgs() of seven groups", lambda: grid.create_pgs(SEVEN)),
                ("create_pg('dp')", lambda: grid.create_pg("dp", name="last")),
            ):
                counted.operations.clear()
                create()
                found[title] = sum(counted.operations.values())
                dist.barrier()
    return found


def by_lazily() -> dict[bool, dict[str, int]]:
    """The operations of one rank, of groups that connect at creation and of lazy ones."""
    return {lazily: operations(lazily=lazily) for lazily in (False, True)}


def lines_of(ranks: list[dict[bool, dict[str, int]]]) -> list[str]:
    """One line for each call: the fewest and the most operations of a rank."""
    lines = []
    for lazily, calls in ranks[0].items():
        for title in calls:
            counts = sorted(rank[lazily][title] for rank in ranks)
            name = f"{title}, lazy_init=True" if lazily else title
            lines.append(f"{name}: {counts[0]} to {counts[-1]} operations")
    return lines


if __name__ == "__main__":
    print(*lines_of(run_ranks(by_lazily, 8)), sep="\n")

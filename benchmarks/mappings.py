"""Measures how long computing the messages of all ranks, or of one rank, takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from measure import Goal, Table, interleaved

from hypercomm import RankLayout, RankMapping

BRIDGE = "megatron-core BridgeCommunicator"


def mapping(runs: int, world_size: int) -> Iterator[Table]:
    """Map tp=8 to tp=4 with twice the dp. Megatron's bridge lists the messages of leaders only."""
    source = RankLayout([8, world_size // 8], ["tp", "dp"])
    target = RankLayout([4, world_size // 4], ["tp", "dp"], world_size)
    rank = target.last_rank

    def table() -> object:
        return RankMapping(source, target).table()

    def leaders() -> object:
        return RankMapping(source, target, leaders=True).table()

    def one_rank() -> object:
        return RankMapping(source, target).receives(rank)

    ways = {
        "hypercomm": table,
        "hypercomm, leaders": leaders,
        BRIDGE: _bridge(source, target),
    }
    what = f"all messages, {world_size:,} ranks to {world_size:,}"
    seen = interleaved({who: _milliseconds(way) for who, way in ways.items()}, runs)
    yield Table(what, "ms", seen, BRIDGE, {"hypercomm": Goal(2000)})
    seen = interleaved({"hypercomm": _milliseconds(one_rank)}, runs)
    what = f"messages of one rank, {world_size:,} ranks to {world_size:,}"
    yield Table(what, "ms", seen, "hypercomm", {"hypercomm": Goal(1)})


def _bridge(source: RankLayout, target: RankLayout) -> Callable[[], object]:
    """Return a call of Megatron's bridge that records the messages of leaders. Nothing is sent."""
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    made = object.__new__(BridgeCommunicator)
    made.src_grid, made.dest_grid = (
        SimpleNamespace(rank_offset=layout.rank_offset, size=layout.size)
        for layout in (source, target)
    )
    made.comm_map = defaultdict(lambda: None)
    ends = [list(layout.groups("dp")[0]) for layout in (source, target)]
    return lambda: made.build_comm_map(*ends)


def _milliseconds(function: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        function()
        return (time.perf_counter() - begin) * 1e3

    return measure

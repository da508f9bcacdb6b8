"""What ranks do with dims of a grid: `grid["tp"]` and what belongs to it."""

import gc
import io
import logging
import os
import warnings
import weakref
from contextlib import redirect_stdout

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.errors import GridDestroyedError, HyperCommError


def places():
    """Where each rank is along all dims, as asked in every way."""
    with HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        seen = []
        for dims in ("tp", "dp", "pp", ("tp", "pp"), "dp+pp", ["tp", "dp", "pp"]):
            here = grid[dims]
            group = here.group
            assert here is grid[dims]
            assert group is grid.get_pg(here.dims) is here.group
            assert str(grid.find(group)) == "+".join(here.dims)
            seen.append(
                (
                    here.rank,
                    here.size,
                    here.ranks,
                    here.prev(),
                    here.next(),
                    here.is_first,
                    here.is_last,
                )
            )
            assert (here.prev(periodic=True), here.next(periodic=True)) == (
                here.ranks[here.rank - 1],
                here.ranks[(here.rank + 1) % here.size],
            )
            assert dist.get_process_group_ranks(group) == list(here.ranks)
        mesh = [grid.get_group("tp") is grid.get_pg("tp"), grid.get_group(-1) is grid.get_pg("tp")]
        mesh += [grid.get_coordinate(), [grid.get_local_rank(dim) for dim in grid.mesh_dim_names]]
        return seen, mesh


def outside():
    """Ranks outside a grid hear so, and are never given None."""
    said = []
    with HyperCommGrid("tp=2", rank_offset=1) as grid:
        for ask in (lambda: grid["tp"].rank, lambda: grid["tp"].group, grid.barrier):
            try:
                said.append(type(ask()).__name__)
            except HyperCommError as error:
                said.append(str(error))
        return (
            said,
            grid["tp"].size,
            grid.get_coordinate(),
            [0 in grid, 1 in grid, "tp" in grid, "dp" in grid],
        )


def changes():
    """What was known of a group is forgotten when it is destroyed, reshaped, or the job ends."""
    grid = HyperCommGrid("tp=2,dp=2")
    tp, dp = grid["tp"], grid["dp"]
    first, before = tp.group, (tp.rank, dp.rank, tp.size)
    grid.destroy_pg("tp")
    second = tp.group
    grid.reshape("tp=1,dp=4")
    after = (tp.rank, dp.rank, tp.size, dp.size, dp.group.size())
    grid.destroy()
    try:
        gone = tp.group
    except HyperCommError as error:
        gone = type(error).__name__
    dist.barrier()
    return first is second, before, after, gone


def sums():
    """Sums, means and barriers over dims."""
    rank = dist.get_rank()
    with HyperCommGrid("tp=2,dp=2") as grid:
        tensor = torch.tensor([float(rank), 1.0])
        seen = [grid["dp"].sum(rank), grid["tp"].mean(float(rank)), grid["tp", "dp"].sum(0.25)]
        seen += [grid["tp"].sum(tensor).tolist(), grid["dp"].mean(tensor).tolist(), tensor.tolist()]
        grid.barrier("tp")
        grid.barrier()
        out = io.StringIO()
        with redirect_stdout(out):
            grid.print_once("loss", 0.5, sep="=")
        log, said = logging.getLogger("of a rank"), io.StringIO()
        log.propagate = False
        for _ in range(2):
            handler = logging.StreamHandler(said)
            handler.addFilter(grid.log_filter())
            log.addHandler(handler)
        log.warning("at %s%%", 50)
        return seen, out.getvalue(), said.getvalue().splitlines()


def seeds():
    with HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        dims = [(), ("tp",), ("dp",), ("pp", "tp"), ("tp+pp",), ("tp", "dp", "pp")]
        loader = torch.utils.data.DataLoader(
            list(range(16)), sampler=grid.sampler(range(16), "dp", seed=3)
        )
        return [grid.seed(7, *each) for each in dims], [int(item) for item in loader]


def forgotten():
    """What dims keep: nothing of a grid that is collected, of a job that ended, or of a parent."""
    gc.disable()
    grid = HyperCommGrid("tp=2")
    group = grid["tp"].group
    pid = os.fork()
    if not pid:
        try:
            grid["tp"].group.size()
            os._exit(1)
        except GridDestroyedError:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        held = weakref.ref(grid)
        del grid
        told = [str(one.message) for one in said if one.category is ResourceWarning]
    dist.destroy_process_group(group)
    with HyperCommGrid("tp=2") as other:
        old = weakref.ref(other["tp"].group)
        dist.barrier()
    del group
    return status, held() is None, len(told), old() is None

"""What the real ranks of grid/test_view_ranks.py do."""

import time

import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.testing import registered_groups
from ranks.common import sum_over

EXPERT = "expert", [4, 2], ["ep", "expt_dp"]


def store_keys():
    """How many keys the job's store holds, once all ranks are here and their messages arrived."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    store.check(["hypercomm"])  # an answer means that all before it was read
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    return keys


def dense_and_expert(batched):
    """The sum over each group of a grid and of its view, in the order of creation."""
    requests = [
        "tp",
        "dp",
        {"dims": "ep", "view": "expert"},
        {"dims": ["expt_dp", "ep"], "view": "expert"},
        {"dims": "expt_dp", "view": "expert"},
    ]
    with HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        grid.register_view(*EXPERT)
        if batched:
            groups = grid.create_pgs(requests)
        else:
            groups = [
                grid.create_pg(**each) if isinstance(each, dict) else grid.create_pg(each)
                for each in requests
            ]
        sums = [sum_over(group) for group in groups]
    return sums, registered_groups() == {dist.group.WORLD}


def shared_pipeline():
    """One group serves a dim that a view shares; what torch has more after each creation."""
    before = len(registered_groups())
    with HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:
        grid.register_view("expert", [4, 1, 2], ["ep", "expt_dp", "pp"], ["pp"])
        expert, counts = grid.view("expert"), []
        pp = grid.create_pg("pp", view="expert")
        counts.append(len(registered_groups()) - before)
        same = grid.get_pg("pp") is pp is expert.get_pg("pp") is expert.ensure_pg("pp")
        counts.append(len(registered_groups()) - before)
        joint = expert.create_pg(["ep", "pp"])
        counts.append(len(registered_groups()) - before)
        sums = sum_over(pp), sum_over(joint), sum_over(expert.create_pg("ep"))
    return counts, same, sums, len(registered_groups()) - before


def another_view(odd, arguments, comes, dims):
    """One rank has registered another view of the name; what each rank is told, and what works."""
    rank = dist.get_rank()
    usual = [2, 2, 2], ["ep", "expt_dp", "pp"], ["pp"]
    mine = arguments if rank == odd else usual
    begin_groups = registered_groups()
    with HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:
        grid.register_view("expert", *mine)
        tp = grid.create_pg("tp")
        before = registered_groups()
        if (rank == odd) == (comes == "last"):
            time.sleep(0.5)
        begin = time.monotonic()
        said = "created"
        try:
            grid.create_pg(dims, view="expert")
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            said = f"{type(error).__name__}: {error}"
        waited = time.monotonic() - begin
        is_clean = said == "created" or (registered_groups() == before and len(grid.pgs) == 1)
        dist.barrier()
        total = sum_over(tp)
    dist.barrier()
    with HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:  # as all of them mean it
        grid.register_view("expert", *usual)
        again = sum_over(grid.create_pg("ep", view="expert"))
    return said, waited, is_clean, total, again, registered_groups() == begin_groups


def destroy_and_recreate(rounds, creation, verify, is_batched):
    """Groups of a key destroyed and created again; sums, and what was left each time."""
    told = []
    with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation, verify=verify) as grid:
        grid.register_view("expert", [4], ["ep"])
        stays = grid.create_pg("tp")
        groups, keys = registered_groups(), []
        for _ in range(rounds):
            if is_batched:
                dp, ep = grid.create_pgs(["dp", {"dims": "ep", "view": "expert"}])
            else:
                dp, ep = grid.create_pg("dp"), grid.create_pg("ep", view="expert")
            told.append((sum_over(dp), sum_over(ep), sum_over(stays)))
            grid.destroy_pg("dp")
            grid.destroy_pg("ep", view="expert")
            told[-1] += (registered_groups() == groups, [str(key) for key in grid.pgs])
            dp = ep = None
            keys.append(store_keys())
    return told, keys


def destroy_shared():
    """Two keys hold one group: it stays until both are gone, and serves the first key again."""
    with HyperCommGrid([1, 2, 2], ["cp", "tp", "dp"], share="identical") as grid:
        tp = grid.create_pg("tp")
        both = grid.create_pg(["cp", "tp"])
        counts = [len(registered_groups())]
        grid.destroy_pg("tp")
        counts.append(len(registered_groups()))
        sums, served = [sum_over(both)], grid.explain(["cp", "tp"]).served_by
        is_one = grid.create_pg("tp") is tp is both
        grid.destroy_pg("tp")
        grid.destroy_pg(["cp", "tp"])
        counts.append(len(registered_groups()))
        sums.append(sum_over(grid.create_pg("tp")))
    return counts, sums, served, is_one


def destroy_at_different_times():
    """Ranks create and destroy at once, without a word in between, some of them late."""
    sums = []
    with HyperCommGrid([4], ["dp"]) as grid:
        for cycle in range(8):
            if dist.get_rank() == cycle % 4:
                time.sleep(0.05)
            group = grid.create_pg("dp")
            if cycle % 2:
                sums.append(sum_over(group))
            grid.destroy_pg("dp")
    return sums

"""What real ranks run in the tests of sets of grids: functions of a module, for processes."""

import time
from dataclasses import fields
from datetime import timedelta

import torch.distributed as dist

from hypercomm import GridSet, RankLayout, megatron_grids
from hypercomm.compat.megatron import collections_of
from hypercomm.compat.megatron.presets import create_megatron_pgs
from hypercomm.errors import HyperCommError
from ranks.common import all_reduce_of
from ranks.common import tables as registered

SIZES = {"encoder": "tp=2,dp=2", "llm": "tp=2,pp=2"}


def sums_of(created):
    """The sum of 10**rank over each group, or None where this rank is in none."""
    return {
        name: [group and all_reduce_of(10 ** dist.get_rank(), group) for group in groups]
        for name, groups in created.items()
    }


def tiled(creation):
    """Two grids of 4 ranks, one behind the other: the sums over groups, and what is left."""
    with GridSet.tile(**SIZES, creation=creation) as warm_up:
        warm_up.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
    before = registered()
    with GridSet.tile(**SIZES, creation=creation) as grids:
        created = grids.create_pgs({"llm": ["pp", ["tp", "pp"]], "encoder": ["tp", "dp"]})
        sums = sums_of(created)
        grids.verify()
        held = sum(group is not None for groups in created.values() for group in groups)
        new = len(registered()[0]) - len(before[0])
    return sums, (held, new), registered() == before, grids.grids_of()


def overlapping():
    """Two grids that share ranks 2..5: the sums over their groups."""
    layouts = {
        "low": RankLayout.parse("tp=2,dp=3"),
        "high": RankLayout.parse("cp=3,dp=2", rank_offset=2),
    }
    with GridSet(layouts) as grids:
        sums = sums_of(grids.create_pgs({"low": ["tp", "dp"], "high": ["cp", "dp"]}))
        return sums, {pair: list(ranks) for pair, ranks in grids.overlaps.items()}


def colocated(share):
    """Two grids on the same ranks; each rank writes its requests in an order of its own."""
    requests = {"training": ["tp", "dp"], "inference": ["tp", "dp"]}
    if dist.get_rank() % 2:
        requests = dict(reversed(requests.items()))
    sizes = {"training": "tp=2,dp=4", "inference": "tp=4,dp"}
    with GridSet.colocated(**sizes, verify=True, share=share) as grids:
        created = grids.create_pgs(requests)
        return list(created), sums_of(created)


def derived_wrongly(_groups):
    raise ValueError("derived wrongly")


def failing():
    """A creation whose second grid fails, seen beforehand or not; then the right call."""
    with GridSet.colocated(a="tp=2,dp", b="tp=4,dp") as grids:
        grids["a"].create_pg(["tp", "dp"])
        before = registered()
        outcomes = []
        wrong = {"dims": "tp", "name": "x", "derive": derived_wrongly}
        for last in ("xx", wrong):
            try:
                grids.create_pgs({"a": ["tp", "dp"], "b": ["tp", last]})
            except (HyperCommError, ValueError) as error:
                outcomes.append((type(error).__name__, registered() == before))
        sums = sums_of(grids.create_pgs({"a": ["tp", "dp"], "b": ["tp"]}))
    return outcomes, sums


def some_fail():
    """Ranks 4..7 ask for another group over all ranks of the second grid."""
    with GridSet.colocated(a="tp=2,dp", b="tp=4,dp", verify=True) as grids:
        before = registered()
        last = {"dims": ["tp", "dp"], "name": "low" if dist.get_rank() < 4 else "high"}
        error = None
        try:
            grids.create_pgs({"a": ["tp"], "b": [last]})
        except HyperCommError as raised:
            error = type(raised).__name__
        return error, registered() == before


SETS = {
    "tiled": {"a": RankLayout.parse("tp=2"), "b": RankLayout.parse("tp=2", rank_offset=2)},
    "overlapping": {"a": RankLayout.parse("tp=4"), "b": RankLayout.parse("tp=2", rank_offset=2)},
    "colocated": {"a": RankLayout.parse("tp=2,dp=2"), "b": RankLayout.parse("tp=4")},
}


def attempt(grids, requests, **arguments):
    """What came of a creation: the error, which keys there are, and the seconds that it took."""
    begin, error = time.monotonic(), None
    try:
        grids.create_pgs(requests, **arguments)
    except (HyperCommError, ValueError) as raised:
        error = type(raised).__name__
    keys = {name: [str(key) for key in grid.pgs] for name, grid in grids.items()}
    return error, keys, time.monotonic() - begin


def one_fails(kind, verify, fails):
    """Rank 3 alone fails in the second grid, as often as is said; each retries at once."""
    outcomes = []

    def derive(groups):
        if dist.get_rank() == 3 and len(outcomes) < fails:
            raise ValueError("mine")
        return groups

    requests = {"a": ["tp"], "b": [{"dims": "tp", "name": "own", "derive": derive}, "tp"]}
    with GridSet(SETS[kind], verify=verify) as grids:
        before = registered()
        for attempted in range(fails + 1):
            outcomes.append(attempt(grids, requests, timeout=timedelta(seconds=30)))
            if attempted < fails and registered() != before:
                outcomes.append("something is left")
        created = {name: list(grid.pgs.values()) for name, grid in grids.items()}
        return outcomes, sums_of(created)


def one_is_late(kind, timeout_s):
    """Rank 3 comes when the others have given up, and are about to try again."""
    requests = {"a": ["tp"], "b": ["tp"]}
    with GridSet(SETS[kind]) as grids:
        time.sleep(timeout_s * 5 / 3 if dist.get_rank() == 3 else 0)
        outcomes = []
        while not outcomes or outcomes[-1][0] is not None:
            outcomes.append(attempt(grids, requests, timeout=timedelta(seconds=timeout_s)))
        created = {name: list(grid.pgs.values()) for name, grid in grids.items()}
        return outcomes, sums_of(created)


def one_asks_otherwise(kind):
    """Rank 0 asks for another group of the second grid, which it may be outside of; then not."""
    others = {"a": ["tp"], "b": ["tp"]}
    requests = {"a": ["tp"], "b": [{"dims": "tp", "name": "other"}]}
    with GridSet(SETS[kind]) as grids:
        first = requests if dist.get_rank() == 0 else others
        outcomes = [attempt(grids, asked) for asked in (first, others)]
        created = {name: list(grid.pgs.values()) for name, grid in grids.items()}
        return outcomes, sums_of(created)


def reshaped(before, after, views):
    """The ranks of Megatron's fields after a model was reshaped, and what each group adds up."""
    with megatron_grids(**before) as grids:
        create_megatron_pgs(grids)
        grids["training"].reshape(after, views=views)
        collection = collections_of(grids)["training"]
        groups = {field.name: vars(collection).get(field.name) for field in fields(collection)}
        ranks = {
            name: group and dist.get_process_group_ranks(group) for name, group in groups.items()
        }
        return ranks, sums_of({"": list(groups.values())})[""]


def megatrons():
    """Training and inference on the same ranks: the sums over groups of both collections."""
    before = registered()
    with megatron_grids(tp=2, pp=2, ep=2, inference={"tp": 4}) as grids:
        collections = create_megatron_pgs(grids)
        names = ("tp", "pp", "dp", "mp", "ep", "expt_dp", "tp_ep_pp", "embd", "pos_embd")
        sums = {
            name: sums_of({"": [getattr(collection, field, None) for field in names]})[""]
            for name, collection in collections.items()
        }
    return sums, registered() == before

"""hypercomm works without private names of torch: one warning, and every group is right."""

import fresh_programs
import pytest
from ranks import private_ranks

from hypercomm.process_groups.torch_internals import capabilities
from hypercomm.testing import run_ranks

SUMS = {
    0: [11, 101, 11, 1111, 101],
    1: [11, 1010, 11, 1111, 1010],
    2: [1100, 101, 1100, 1111, 101],
    3: [1100, 1010, 1100, 1111, 1010],
}
STARTS = """
import logging
import sys
import torch
import torch.distributed as dist

for loaded in [*sys.modules]:
    if loaded.partition(".")[0] == "hypercomm":
        del sys.modules[loaded]  # its first import looks for the names

logging.basicConfig(format="logged: %(message)s")
owner, _, name = {path!r}.rpartition(".")
target = torch
for part in owner.split("."):
    target = getattr(target, part)
{change}
from hypercomm import HyperCommGrid
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with HyperCommGrid([1, 1], ["tp", "dp"]) as grid:
    for group in grid.create_pgs(["tp", "dp"]):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 1
    print(grid.explain("tp").strategy)
dist.destroy_process_group()
"""
RENAMED = """
honest = target._process_group_name
target._process_group_name = lambda *given, **named: honest(*given, **named)
"""


# This torch has every name.
def test_this_torch():
    assert [path for path, is_there in capabilities.FLAGS.items() if not is_there] == []


# With each flag cleared, and with all of them, groups are created by public functions, communicate
# rightly, and leave nothing behind.
@pytest.mark.long
def test_groups_are_right_without_private_names():
    for rank, of_rank in enumerate(run_ranks(private_ranks.without_each, 4, timeout=300)):
        assert of_rank.keys() == {"none", "all", *private_ranks.NAMES}
        for lost, (sums, strategy, is_clean) in of_rank.items():
            assert (lost, sums) == (lost, SUMS[rank])
            assert is_clean, lost
            needed = {"all", "HELPER", "TABLES", "STORE"}
            assert strategy == ("enumerate" if lost in needed else "local")


# A name that torch lacks, or that takes other arguments, gives one warning, which names it.
@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("distributed.distributed_c10d._abort_process_group", "delattr(target, name)"),
        ("distributed.distributed_c10d._process_group_name", RENAMED),
    ],
)
def test_one_warning(path, change):
    done = fresh_programs.run(STARTS.format(path=path, change=change))
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert printed == ["local"]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("logged: ")]
    assert f" lacks private names, or they have changed: {path} (" in line


# A rank that is outside an enumerated group decides nothing about torch's gloo class: its peers,
# which are members, would decide otherwise, and later groups would connect in two ways.
def test_ranks_decide_the_same_about_gloo():
    assert run_ranks(private_ranks.flag_after_enumeration, 3) == [
        (True, True),
        (False, True),
        (True, True),
    ]

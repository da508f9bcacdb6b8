"""`hypercomm plan`: what stays on a screen, what communicators cost, views and places."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from launched import rank_free
from ranks import plan_ranks
from test_cli_check import misfits

from hypercomm import RankLayout
from hypercomm.cli.plan.communicators import Communicators, count
from hypercomm.cli.plan.keys import read_keys, read_views
from hypercomm.cli.plan.picture import picture
from hypercomm.cli.plan.schema import SCHEMA
from hypercomm.launch import run_ranks


def on_a_terminal(height, width, *arguments):
    """What a terminal of this size shows, in lines."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {
        name: value for name, value in rank_free().items() if name not in ("COLUMNS", "LINES")
    }
    with subprocess.Popen(
        [sys.executable, "-m", "hypercomm", "plan", *arguments],
        stdout=its,
        env=environment | {"TERM": "xterm"},
    ):
        os.close(its)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r", "").splitlines()


# 24 lines of 80 columns hold a plan of up to six dims, and the prompt after it, the small world's
# own picture included where it fits; a narrow terminal does, too, and a low one.
@pytest.mark.parametrize(
    ("arguments", "height", "width"),
    [
        (("tp=2,cp=2,dp=2,ep=2,fsdp=2,pp=2",), 24, 80),
        (("dp_replicate=4,dp_shard=4,cp=16,tp=2,ep=16,pp=16", "--rank", "77"), 24, 80),
        (("tp=2,cp=2,dp=4",), 24, 40),
        (("tp=2,cp=2,dp=4,pp=2,ep=2,x=2",), 24, 80),
        (("tp=2,cp=2,dp=4,pp=2,ep=2,x=2",), 24, 40),
        (("tp=2,cp=2,dp=4,pp=2",), 16, 80),
    ],
)
def test_one_screen(arguments, height, width):
    lines = on_a_terminal(height, width, *arguments)
    assert min(15, height - 2) < len(lines) < height
    assert not any("gro…" in line for line in lines)
    assert max(map(len, lines)) <= width
    for dim in RankLayout.parse(arguments[0]).dim_names:
        assert any(line.startswith(f"{dim} ") for line in lines)


# Where nobody looks on it is as if 24 lines did; --max-dims shows all that it says.
def test_what_is_left_out(in_process):
    sizes = "tp=2,cp=2,ep=2,dp=16,fsdp=2,pp=2"
    lines = in_process("plan", sizes).stdout.splitlines()
    assert len(lines) < 24
    assert f"and {63 - 13} more of 63: --max-dims, or --groups, shows them" in lines
    first = [line.split()[0] for line in lines[4:17]]
    assert first[:6] == ["tp", "cp", "ep", "dp", "fsdp", "pp"]
    assert set(first[6:]) == {"cp+dp", "tp+pp", "tp+cp", "tp+cp+dp", "tp+dp", "tp+ep", "tp+ep+pp"}
    found = json.loads(in_process("plan", sizes, "--json").stdout)["groups"]
    assert len(found) == 63
    pairs = json.loads(in_process("plan", sizes, "--max-dims", "2", "--json").stdout)["groups"]
    assert len(pairs) == 6 + 15
    assert "more of" not in in_process("plan", sizes, "--max-dims", "2").stdout


def members(layout, dims, rank):
    """The ranks whose other coordinates are those of a rank."""
    own = layout.coords(rank)
    fixed = {dim: index for dim, index in own.items() if dim not in dims}
    return frozenset(layout.ranks_where(**fixed))


# Counted by hand, rank by rank: sets of ranks, of one view or several.
@pytest.mark.parametrize(
    ("sizes", "views"),
    [
        ("tp=2,cp=1,dp=2,pp=2", []),
        ("tp=1", []),
        ("tp=4,dp=6", ["ep=8,rest=3"]),
        ("a=2,b=4", ["c=2,d=2,f=2"]),
        ("tp=2,dp=6,pp=2", ["e:ep=4,edp=3,pp=2", "x=6,y=4", "x=3,z=8"]),
    ],
)
def test_communicators_by_hand(sizes, views):
    layout = RankLayout.parse(sizes)
    others = read_views(layout, views)
    keys = read_keys(layout, others, None)
    layouts = {None: layout} | {name: view for name, view, _ in others}
    alone, shared = count(keys, lambda key: layouts[key.view])
    for rank in layout.ranks:
        every = [members(layouts[key.view], key.dims, rank) for key in keys]
        assert alone == Communicators.of(map(len, every))
        assert shared == Communicators.of(map(len, set(every)))


# Real gloo ranks have as many groups, and connections of TCP, as the plan says.
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts connections in /proc")
@pytest.mark.parametrize(
    ("sizes", "views"), [("tp=2,cp=1,dp=4", []), ("tp=2,dp=2,pp=2", ["expert:ep=4,pp=2"])]
)
def test_communicators_of_real_ranks(sizes, views, in_process):
    asked = [part for view in views for part in ("--view", view)]
    plan = json.loads(in_process("plan", sizes, *asked, "--json").stdout)
    keys = [(groups["view"], groups["dims"]) for groups in plan["groups"]]
    own = [(name, view["layout"], view["shared_dims"]) for name, view in plan["views"].items()]
    for share in ("never", "identical"):
        said = plan["communicators"]["groups"][share]
        found = run_ranks(plan_ranks.what_is_created, 8, args=(sizes, own, keys, share), timeout=90)
        wanted = said["process_groups"], said["communicators"], said["gloo_sockets"]
        assert found == [wanted] * 8


# NCCL's buffers: 4 MiB, 512 KiB and 4800 KiB, for 2 connections of each channel.
def test_memory(in_process):
    done = in_process("plan", "tp=2,cp=1,dp=4", "--nccl-channels", "24", "--json")
    found = json.loads(done.stdout)["communicators"]
    assert found["nccl_bytes_each"] == 24 * 2 * (4096 + 512 + 4800) * 1024
    assert found["single_dims"]["never"] == {
        "process_groups": 3,
        "communicators": 2,
        "nccl_bytes": 2 * found["nccl_bytes_each"],
        "gloo_sockets": 1 + 3,
    }
    text = in_process("plan", "tp=2,cp=1,dp=4", "--nccl-channels", "24").stdout
    assert re.search(r"single dims +3 +882 MiB +4 +3 +882 MiB +4\n", text)
    assert "NCCL: about 441 MiB each, of 2 ranks or more on 24 channels" in text


# The rows of a picture are as wide as the screen at most, and give way to the groups.
@pytest.mark.parametrize(
    ("width", "height", "rows", "row"),
    [
        (80, None, 2, "pp=0   0* 1   2  3   4  5   6  7 |  8  9  10 11  12 13  14 15"),
        (60, None, 8, "pp=0 dp=0   0* 1   2  3"),
        (29, 9, 8, "pp=0 dp=0   0* 1   2  3"),
        (80, 3, 2, "pp=0   0* 1   2  3   4  5   6  7 |  8  9  10 11  12 13  14 15"),
        (80, 2, -1, None),
        (60, 8, -1, None),
        (28, None, -1, None),
    ],
)
def test_room_of_the_world(width, height, rows, row):
    lines = picture(RankLayout.parse("tp=2,cp=2,dp=4,pp=2"), 8, 0, width, height)
    assert len(lines) == rows + 1
    assert max(map(len, lines), default=0) <= width
    assert lines[1:2] == [row][: len(lines)]


# A small world is there itself, hosts apart; --rank marks one. A large one is not.
def test_the_world_itself(in_process):
    lines = in_process("plan", "tp=2,cp=2,dp=2", "--gpus-per-node", "2", "--rank", "6").stdout
    assert "dp=0  0 1 | 2 3\ndp=1  4 5 | 6*7\n" in lines
    ranks = set(range(100, 164))
    drawn = "\n".join(picture(RankLayout.parse("a=4,b=4,c=4", rank_offset=100), 8, 100))
    assert {int(number) for number in re.findall(r"1\d\d", drawn)} == ranks
    assert picture(RankLayout.parse("tp=8,dp=64"), 8, 0) == []
    assert picture(RankLayout.parse("tp=2,dp=31"), 8, 0) == []


# Views are there in all of it, and what is printed is what the schema says.
def test_views_and_the_schema(in_process):
    view = ("--view", "expert:ep=4,rest=-1", "--rank", "5")
    answer = json.loads(in_process("plan", "tp=2,dp=4", *view, "--json").stdout)
    assert misfits(answer, SCHEMA) == []
    assert answer["views"]["expert"]["coords"] == {"ep": 1, "rest": 1}
    assert {(row["view"], *row["dims"]) for row in answer["groups"]} == {
        (None, "tp"),
        (None, "dp"),
        (None, "tp", "dp"),
        ("expert", "ep"),
        ("expert", "rest"),
        ("expert", "ep", "rest"),
    }
    text = in_process("plan", "tp=2,dp=4", *view, "--groups", "dp,ep").stdout
    assert "expert: ep=4,rest=2; there it is at ep=1, rest=1" in text
    assert re.search(r"expert:ep +2 +4 +1 +1 +4 5 6 7", text)
    assert json.loads(in_process("plan", "--json-schema").stdout) == SCHEMA


# The places of some ranks, or of all, in place of the groups.
def test_places(in_process):
    view = ("--view", "expert:ep=4,rest=-1", "--gpus-per-node", "4")
    done = in_process("plan", "tp=2,dp=4", *view, "--ranks", "0, 5..6")
    assert done.stdout == (
        "rank  tp  dp  expert:ep  expert:rest  host\n"
        "   0   0   0          0            0     0\n"
        "   5   1   2          1            1     1\n"
        "   6   0   3          2            1     1\n"
    )
    answer = json.loads(in_process("plan", "tp=2,dp=4", *view, "--ranks", "all", "--json").stdout)
    assert misfits(answer, SCHEMA) == []
    assert [place["rank"] for place in answer["places"]] == list(range(8))
    assert answer["places"][7]["coords"] == {"tp": 1, "dp": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "8"), "rank 8 is not in layout tp=2,dp=4, which holds ranks 0..7"),
        (("--rank", "9", "--ranks", "all"), "rank 9 is not in layout tp=2,dp=4, which holds"),
        (("--ranks", "3..1"), "'3..1' ends before it begins; write it like '0..7'"),
        (("--ranks", "x"), "'x' is no rank; write ranks like '0..7,12' or 'all'"),
        (("--ranks", "-1"), "'-1' is no rank; write ranks like '0..7,12' or 'all'"),
        (("--ranks", ""), "'' is no rank; write ranks like '0..7,12' or 'all'"),
        (("--ranks", "0..9999999999"), "--ranks '0..9999999999' are more than 1,048,576, the most"),
        (("--max-dims", "0"), "0 is not in the range x>=1"),
        (("--max-dims", "1", "--groups", "tp"), "--groups and --max-dims both say which groups"),
        (("--view", "ep=3"), "ep=3 needs 3 ranks; the layout tp=2,dp=4 has 8"),
        (("--view", "base:ep=8"), "View 'base' is that of the grid's own dims"),
        (("--groups", "ep"), "unknown dim 'ep'; this layout has dims ('tp', 'dp')"),
        (("--nccl-channels", "0"), "0 is not in the range 1<=x<=64"),
    ],
)
def test_mistakes_in_a_plan(arguments, message, in_process):
    done = in_process("plan", "tp=2,dp=4", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


# Twenty dims have a million combinations.
def test_too_many_combinations(in_process):
    sizes = ",".join(f"d{number}=2" for number in range(20))
    assert (
        "too many combinations of up to 20" in in_process("plan", sizes, "--max-dims", "20").stderr
    )
    assert "and 190 more of 210" in in_process("plan", sizes).stdout

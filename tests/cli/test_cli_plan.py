"""`hypercomm plan`: views and coordinates."""

import json
import re

import pytest


# Views are in all of it. A pipe gets no line that ends with spaces.
def test_views(in_process):
    view = ("--view", "expert:ep=4,rest=-1", "--rank", "5")
    answer = json.loads(in_process("plan", "tp=2,dp=4", *view, "--json").stdout)
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
    assert "expert: ep=4,rest=2; rank 5 is at ep=1, rest=1" in text
    assert re.search(r"expert:ep +2 +4 +1 +1 +4 5 6 7\n", text)
    assert not re.search(r" $", text, re.MULTILINE)


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
        (("--view", "ep=3"), "ep=3 needs 3 ranks; the layout tp=2,dp=4 has 8"),
        (("--view", "base:ep=8"), "View 'base' is that of the grid's own dims"),
        (("--groups", "ep"), "unknown dim 'ep'; this layout has dims ('tp', 'dp')"),
    ],
)
def test_mistakes_in_a_plan(arguments, message, in_process):
    done = in_process("plan", "tp=2,dp=4", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


# Up to six dims have every combination, more only the pairs: twenty have a million combinations.
@pytest.mark.parametrize(("dims", "count"), [(6, 63), (7, 28), (20, 210)])
def test_the_combinations(dims, count, in_process):
    sizes = ",".join(f"d{number}=2" for number in range(dims))
    found = json.loads(in_process("plan", sizes, "--json").stdout)["groups"]
    assert len(found) == count

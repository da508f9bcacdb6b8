"""`hypercomm diff` as a user meets it: a process with arguments, two streams and an exit code."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch_free


def diff(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hypercomm", "diff", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def table_of(done):
    """The lines that say something, without the spaces around them."""
    lines = [line.strip() for line in done.stdout.splitlines()]
    return [line for line in lines if line.strip("─")]


# One example as it is printed: tp takes cp in, so that tp+cp becomes the new tp.
def test_table():
    done = diff("tp=2,cp=2,dp=2", "tp=4,dp=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert table_of(done) == [
        "before     after   groups x size   result",
        "tp         -               4 x 2   gone",
        "cp         -               4 x 2   gone",
        "dp         dp              4 x 2   kept",
        "tp+cp      tp              2 x 4   kept",
        "tp+dp      -               2 x 4   gone",
        "cp+dp      -               2 x 4   gone",
        "tp+cp+dp   tp+dp           1 x 8   kept",
        (
            "tp=2,cp=2,dp=2 to tp=4,dp=2: 7 of 19 groups are kept, 12 gone, 0 new; "
            "4 of 8 ranks change coordinates"
        ),
    ]


# With an offset only some groups stay, and the ranks at the ends are gone and new.
def test_offset():
    done = diff("tp=2,dp=4", "tp=2,dp=2", "--before-offset", "2", "--after-offset", "8")
    assert done.returncode == 0, done.stderr
    assert table_of(done) == [
        "before   after   groups x size   result",
        "tp       tp         4 -> 2 x 2   partly: 1 of 4 kept",
        "dp       -               2 x 4   gone",
        "tp+dp    -               1 x 8   gone",
        "-        dp              2 x 2   new",
        "-        tp+dp           1 x 4   new",
        (
            "tp=2,dp=4 from rank 2 to tp=2,dp=2 from rank 8: 1 of 7 groups are kept, 6 gone, "
            "4 new; 2 of 2 shared ranks change coordinates, 6 are gone, 2 are new"
        ),
    ]


# --json prints one JSON object and nothing else.
def test_json():
    done = diff("tp=2,dp=2", "dp=2,tp=1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == {
        "before": "tp=2,dp=2",
        "before_offset": 0,
        "after": "dp=2,tp=1",
        "after_offset": 0,
        "changes": [
            {
                "before": ["tp"],
                "after": ["dp"],
                "groups_before": 2,
                "groups_after": 1,
                "size": 2,
                "kept": 1,
                "result": "partly",
            },
            {
                "before": ["dp"],
                "after": [],
                "groups_before": 2,
                "groups_after": 0,
                "size": 2,
                "kept": 0,
                "result": "gone",
            },
            {
                "before": ["tp", "dp"],
                "after": [],
                "groups_before": 1,
                "groups_after": 0,
                "size": 4,
                "kept": 0,
                "result": "gone",
            },
        ],
        "groups": {"kept": 1, "gone": 4, "new": 0},
        "ranks": {"shared": 2, "moved": 1, "gone": 2, "new": 0},
    }


# An unspecified size is inferred from the other layout, or from --world-size on both.
@pytest.mark.parametrize(
    ("arguments", "layouts"),
    [
        (("tp=2,cp=2,dp=8", "tp=4,dp"), ("tp=2,cp=2,dp=8", "tp=4,dp=8")),
        (("tp=4,dp=-1", "tp=2,cp=2,dp=8"), ("tp=4,dp=8", "tp=2,cp=2,dp=8")),
        (("tp=4,dp", "tp=2,dp", "--world-size", "16"), ("tp=4,dp=4", "tp=2,dp=8")),
    ],
)
def test_open_sizes(arguments, layouts):
    answer = json.loads(diff(*arguments, "--json").stdout)
    assert (answer["before"], answer["after"]) == layouts


# Names that look like markup are printed as they are, and one rank has no groups to show.
def test_odd_layouts():
    assert "[red]    dp              1 x 2   kept" in diff("[red]=2", "dp=2").stdout
    done = diff("tp=1", "dp=1")
    assert table_of(done) == [
        "tp=1 to dp=1: 0 of 0 groups are kept, 0 gone, 0 new; 0 of 1 ranks change coordinates"
    ]


# Every mistake in a call ends with exit code 2, nothing on stdout, and what was wrong.
@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("tp=2,dp=-1", "tp=4,dp"),
            "'tp=2,dp=-1' and 'tp=4,dp' have an unspecified size; give one of",
        ),
        (("tp=2,dp", "tp=2,dp"), "or the number of ranks with --world-size"),
        (("tp=2,,dp", "tp=2"), "'tp=2,,dp'"),
        (("tp=2", "tp=x"), "the size in 'tp=x' must be a positive integer"),
        (("tp=8", "tp=3,dp"), "multiple of 3 ranks, as 6 and 9; the other layout has 8"),
        (("tp=8", "tp=4", "--world-size", "8"), "tp=4 needs 4 ranks; --world-size is 8"),
        (("tp=2", "dp=33554432"), "after has 33,554,432 ranks; layouts of up to 16,777,216 are"),
        ((",".join(f"d{i}=2" for i in range(13)), "dp=2"), "before has 13 dims larger than 1"),
    ],
)
def test_mistakes(arguments, message, in_process):
    done = in_process("diff", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


# A call without its arguments says how it is made.
@pytest.mark.parametrize("arguments", [(), ("tp=2",), ("tp=2", "tp=2", "dp=2")])
def test_wrong_usage(arguments):
    done = diff(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: hypercomm diff [OPTIONS] BEFORE AFTER\n")


# torch is not loaded.
def test_without_torch():
    program = (
        "import sys; from hypercomm.cli import main\n"
        "code = main(['diff', 'tp=8,dp=4', 'tp=4,dp=8', '--json']); assert code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

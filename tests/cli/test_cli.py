"""Test output, errors and exit codes of `plan`, `diff`, `place`, `draw` and `blame`."""

import json
import re
import subprocess
import sys

import click
import pytest
from processes import launcher_free, run_python

from hypercomm import __version__
from hypercomm.cli import cli


def hypercomm(*arguments, before="", **variables):
    """Run `hypercomm` in a new process that first runs the code `before`."""
    program = f"{before}\nimport sys; from hypercomm.__main__ import main; sys.exit(main())"
    return run_python("-c", program, *arguments, **variables)


# A plan as JSON matches the layout. (The plan as a table is checked with the page that shows it.)
def test_plan_as_json(in_process):
    sizes = "tp=8,cp=2,dp=64,pp=8"
    plan = json.loads(in_process("plan", sizes, "--rank", "37", "--json").stdout)
    assert (plan["ranks"], plan["hosts"], plan["rank"]) == (8192, 1024, 37)
    # 37 = 5 + 8 * 0 + 16 * 2
    assert plan["coords"] == {"tp": 5, "cp": 0, "dp": 2, "pp": 0}
    rows = {"+".join(row["dims"]): row for row in plan["groups"]}
    assert len(rows) == 2**4 - 1
    assert (rows["dp"]["groups"], rows["dp"]["strides"]) == (128, [16])
    assert rows["dp"]["hosts_per_group"] == [64, 64]
    assert rows["dp"]["example"] == list(range(5, 5 + 16 * 16, 16))
    assert rows["tp+cp"]["hosts_per_group"] == [2, 2]
    assert plan["ranks_per_host"] == [8, 8]
    # With more than six dims, only pairs are listed, because 20 dims have a million combinations.
    found = in_process("plan", ",".join(f"d{number}=2" for number in range(7)), "--json").stdout
    assert len(json.loads(found)["groups"]) == 7 + 21


# --on accepts every form that place accepts. Here three hosts have 4, 2 and 6 GPUs.
def test_plan_on_a_machine(in_process, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=2\nc slots=6\n", encoding="utf-8")
    plan = json.loads(in_process("plan", "tp=2,dp=6", "--on", str(file), "--json").stdout)
    assert (plan["hosts"], plan["ranks_per_host"]) == (3, [2, 6])
    reached = {"+".join(row["dims"]): row["hosts_per_group"] for row in plan["groups"]}
    assert reached == {"tp": [1, 1], "dp": [3, 3], "tp+dp": [3, 3]}
    assert "3 hosts of 2..6; rank 0" in in_process("plan", "tp=2,dp=6", "--on", str(file)).stdout
    on_four = json.loads(in_process("plan", "tp=8,dp=2", "--on", "4", "--json").stdout)
    assert (on_four["hosts"], on_four["groups"][0]["hosts_per_group"]) == (4, [2, 2])


# The plan lists all groups of a view, or only the selected groups, and the coordinates of the ranks
# in the view.
def test_plan_with_a_view(in_process):
    view = ("plan", "tp=2,dp=4", "--view", "expert:ep=4,rest=-1", "--rank", "5")
    answer = json.loads(in_process(*view, "--json").stdout)
    assert answer["views"]["expert"]["coords"] == {"ep": 1, "rest": 1}
    found = ["+".join(row["dims"]) for row in answer["groups"] if row["view"] == "expert"]
    assert found == ["ep", "rest", "ep+rest"]
    text = in_process(*view, "--groups", "dp,ep").stdout
    assert re.search(r"\ndp +2 +4 +2 +1 +1 3 5 7\nexpert:ep +2 +4 +1 +1 +4 5 6 7\n$", text)


# An unspecified size is inferred from the job of this process. If all sizes are specified, no job
# is needed.
@pytest.mark.parametrize(
    ("environment", "sizes", "layout"),
    [
        ({"WORLD_SIZE": "64"}, ["tp=2,dp=-1"], "tp=2,dp=32"),
        ({"WORLD_SIZE": "64"}, ["tp=2,dp=-1", "--world-size", "8"], "tp=2,dp=4"),
        ({"WORLD_SIZE": "many"}, ["tp=2,dp=5"], "tp=2,dp=5"),
        ({"WORLD_SIZE": "many"}, ["tp=2,dp=-1"], "WORLD_SIZE must be an integer"),
        ({"WORLD_SIZE": "9"}, ["tp=2,dp=-1"], "the job has 9 (WORLD_SIZE=9)"),
    ],
)
def test_plan_in_a_job(environment, sizes, layout, in_process, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = in_process("plan", *sizes, "--json")
    assert layout in (done.stderr or json.loads(done.stdout)["layout"])


# tp absorbs cp, so tp+cp becomes the new tp. An unspecified size is inferred from the other layout.
# If both layouts have one, the sizes are inferred from --world-size. Names that look like markup
# are printed literally.
@pytest.mark.parametrize(
    "arguments",
    [
        ("[tp]=2,cp=2,dp=2", "[tp]=4,dp=2"),
        ("[tp]=2,cp=2,dp=-1", "[tp]=4,dp=2"),
        ("[tp]=2,cp=2,dp", "[tp]=4,dp", "--world-size", "8"),
    ],
)
def test_diff_as_text_and_json(arguments, in_process):
    last = in_process("diff", *arguments).stdout.splitlines()[-1]
    assert last.endswith("7 of 19 groups are kept, 12 gone, 0 new; 4 of 8 ranks change coordinates")
    answer = json.loads(in_process("diff", *arguments, "--json").stdout)
    assert answer["groups"] == {"kept": 7, "gone": 12, "new": 0}
    assert answer["ranks"] == {"shared": 8, "moved": 4, "gone": 0, "new": 0}
    row = {"before": ["[tp]", "cp"], "after": ["[tp]"], "groups_before": 2, "groups_after": 2}
    assert answer["changes"][3] == {**row, "size": 4, "kept": 2, "result": "kept"}


# A reader that closes the pipe, as `head` does, causes no error.
@pytest.mark.parametrize("form", [(), pytest.param(("--json",), marks=pytest.mark.full)])
def test_closed_pipe(form):
    sizes = ",".join(f"{'d' * 240}{number}=1" for number in range(200))  # prints over 64 KiB
    with subprocess.Popen(
        [sys.executable, "-m", "hypercomm", "plan", sizes, *form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=launcher_free(),
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


# Shell completion shows the descriptions of `hypercomm --help`, which are whole sentences.
def test_descriptions_of_commands():
    help_text = cli.get_help(click.Context(cli, info_name="hypercomm"))
    for name in cli.list_commands(None):
        described = cli.get_command(None, name).get_short_help_str()
        assert re.search(rf"^  {name} +{re.escape(described)}$", help_text, re.MULTILINE)
        assert re.fullmatch(r"[^.]+\.", described)


# --version and --help work without torch. If a package is missing, the error shows how to install
# it.
def test_without_torch_or_an_extra():
    lacking = "import sys; sys.modules['torch'] = None"
    calls = [["--help"], ["plan", "--help"], ["check", "--help"]]
    helps = f"{lacking}; from hypercomm.cli import main; [main(one) for one in {calls}]"
    done = hypercomm("--version", before=helps)
    assert done.stdout.count("Usage: ") == 3
    assert done.stdout.split()[-1] == __version__
    done = hypercomm("place", "tp=2", "--on", "live", before=lacking, RANK="0", WORLD_SIZE="1")
    assert re.fullmatch("hypercomm: .* needs torch: pip install torch\n", done.stderr)
    for name in ("click", "rich"):
        find = f"lambda name: None if name == {name!r} else 1"
        done = hypercomm("plan", before=f"import importlib.util as u; u.find_spec = {find}")
        message = f"hypercomm: the command line needs {name}: pip install {name}\n"
        assert (done.returncode, done.stderr) == (2, message)

"""Test `hypercomm doctor` with the installed torch and with changed environments."""

import json
import os
import re
import sys
from importlib import metadata

import forked_programs
from test_cli import hypercomm

from hypercomm import __version__
from hypercomm.cli.doctor import matters

UNTOUCHED = {name: value for name, value in os.environ.items() if not matters(name)}
PROGRAM = "import sys; from hypercomm.cli import main; sys.exit(main(sys.argv[1:]))"

WITH_GPUS = """
import torch
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_name = lambda _: "Tesla [T4]"
"""


def doctor(*arguments, before="", **variables):
    """Run `hypercomm doctor` in a new process that first runs the code `before`."""
    return forked_programs.run(
        f"{before}\n{PROGRAM}", "doctor", *arguments, environment=UNTOUCHED | variables
    )


def answer(before="", **variables):
    """Return the exit code and the JSON output."""
    done = doctor("--json", before=before, **variables)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


# The report lists the installed versions, every backend that torch knows and every creation
# strategy. It gives the reason if a backend or a strategy cannot be used. The text contains
# everything that the JSON contains.
def test_report_as_json_and_text():
    code, found = answer()
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    versions, reasons = found["versions"], found["backends"]
    for package in ("numpy", "attrs"):
        assert versions[package] == metadata.version(package)
    assert versions["hypercomm"] == __version__
    assert versions["torch"].split("+")[0] == metadata.version("torch").split("+")[0]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert reasons["gloo"] is None
    assert reasons["mpi"] == "is not available in this build of torch"
    assert {"nccl", "ucc"} <= set(reasons)
    states = found["strategies"]
    assert (states["local"], states["enumerate"]) == (None, None)
    assert states["split"] == "gloo cannot split; a split needs a WORLD bound to a device"
    done = doctor(before=WITH_GPUS)
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert "GPUs 2 x Tesla [T4] launcher none" in text
    assert [name for name in {*reasons, *states, *versions} if name not in text] == []


# If no group can be created, the exit code is 1 and the reason is reported. Relevant variables are
# shown with their values, even if the values are long. Other variables are not shown. doctor finds
# the job, but does not join it.
def test_environment_is_reported():
    matter = {"GLOO_SOCKET_IFNAME": "nosuch0", "NCCL_DEBUG_FILE": "x" * 150, "SLURM_PROCID": ""}
    launcher = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    others = {"MY_SECRET": "hush-1", "MY_NCCL_KEY": "hush-2", "SLURM_JWT": "hush-3"}
    code, found = answer(**matter, **launcher, **others)
    assert (code, found["problems"]) == (1, ["no process group could be created"])
    assert "nosuch0" in found["strategies"]["local"]
    assert found["environment"] == matter | launcher
    assert found["launcher"] == "the environment: RANK=3 and WORLD_SIZE=4 of the environment"
    text = doctor(**matter, RANK="3", NCCL_NET="a\nb\x1b[31mc").stdout
    assert re.search(r"^NCCL_NET +'a\\nb\\x1b\[31mc'$", text, re.MULTILINE)
    assert "WORLD_SIZE is missing" in " ".join(text.split())
    assert text.count("x" * 40) >= 2
    assert "(empty)" in text


# Without torch, versions are still reported.
def test_report_without_torch():
    done = hypercomm("doctor", "--json", before="import sys; sys.modules['torch'] = None")
    found = json.loads(done.stdout)
    assert (done.returncode, found["strategies"], found["gpus"]) == (1, {}, None)
    [problem] = found["problems"]
    assert problem.startswith("torch cannot be loaded: ModuleNotFoundError: ")
    assert found["versions"]["torch"] == metadata.version("torch")

"""`hypercomm doctor` as a user meets it, on the torch at hand and on one that lacks something."""

import json
import logging
import os
import subprocess
import sys
from importlib import metadata

import fresh_programs
import pytest

from hypercomm import __version__
from hypercomm.cli import main
from hypercomm.cli.doctor import matters
from hypercomm.cli.printing import quiet
from hypercomm.testing import fake_world

UNTOUCHED = {name: value for name, value in os.environ.items() if not matters(name)}

OTHER_HELPER = """
import sys
for name in [*sys.modules]:
    if name.partition(".")[0] == "hypercomm":
        del sys.modules[name]
import torch.distributed.distributed_c10d as c10d
helper = c10d._new_process_group_helper
c10d._new_process_group_helper = lambda *args, **named: helper(*args, **named)
"""
"""hypercomm looks for torch's private names when it is imported."""

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"
WITH_GPUS = """
import torch
torch.cuda.device_count, torch.cuda.get_device_name = lambda: 2, lambda _: "Tesla [T4]"
"""


def doctor(*arguments, before="", **variables):
    """The output of the command in a fresh process, after some code has run there."""
    program = f"{before}\nimport sys; from hypercomm.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = UNTOUCHED | variables
    if before != WITHOUT_TORCH:
        return fresh_programs.run(program, "doctor", *arguments, environment=environment)
    return subprocess.run(
        [sys.executable, "-c", program, "doctor", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def answer(before="", **variables):
    """The exit code, and what JSON says."""
    done = doctor("--json", before=before, **variables)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def found():
    """The report of this machine, on which everything works."""
    code, found = answer()
    assert code == 0
    return found


@pytest.fixture(scope="module")
def text():
    """The same in words."""
    done = doctor()
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def words(text):
    """The words of a text, however its lines and cells are broken."""
    return " ".join(text.split())


def installed(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Versions are those that are installed, null where there is none; all is well.
def test_versions(found, text):
    assert (found["ok"], found["problems"]) == (True, [])
    versions = found["versions"]
    for package in ("numpy", "attrs", "megatron-core", "deepspeed"):
        assert versions[package] == installed(package)
    assert versions["hypercomm"] == __version__
    assert versions["torch"].split("+")[0] == metadata.version("torch").split("+")[0]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(versions) == sorted(versions)
    for version in filter(None, versions.values()):
        assert version in text


# Every backend that torch knows is there, with the reason where it cannot run.
def test_backends(found, text):
    reasons = found["backends"]
    assert reasons["gloo"] is None
    assert reasons["mpi"] == "is not available in this build of torch"
    assert {"nccl", "ucc"} <= set(reasons)
    for reason in filter(None, reasons.values()):
        assert reason.split()[0] in text


# Ways of creating groups are tried, and those that cannot work here have their reason.
def test_strategies(found, text):
    by_name = {strategy["name"]: strategy for strategy in found["strategies"]}
    states = {name: strategy["state"] for name, strategy in by_name.items()}
    assert states == {"local": "works", "split": "not here", "enumerate": "works"}
    assert by_name["split"]["says"].startswith("WORLD is not bound to a device")
    assert by_name["split"]["seconds"] is None
    assert all(0 < by_name[name]["seconds"] < 10 for name in ("local", "enumerate"))
    for strategy in found["strategies"]:
        assert strategy["says"] in words(text)


# The text fits into 100 columns, has no colours where it is no terminal's, and says at the end
# what a bug report needs.
def test_text(text):
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    *_, verdict, last = text.splitlines()
    assert verdict == "hypercomm works with this torch"
    assert "hypercomm doctor --json" in last
    assert "launcher none" in words(text)


# A strategy that needs a missing private name of torch is reported, and another one works.
def test_a_missing_strategy():
    code, found = answer(OTHER_HELPER)
    assert (code, found["ok"]) == (0, True)
    states = {strategy["name"]: strategy["state"] for strategy in found["strategies"]}
    assert states == {"local": "not here", "split": "not here", "enumerate": "works"}
    assert "_new_process_group_helper" in found["strategies"][0]["says"]


# Where no group can be created the exit code is 1, and the reason is said, here one of the
# environment's.
@pytest.mark.parametrize(
    ("name", "value", "failed", "reason"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0", ["local", "split", "enumerate"], "nosuch0"),
        ("HYPERCOMM_VERIFY", "2", ["local", "enumerate"], "HYPERCOMM_VERIFY must be 0 or 1"),
    ],
)
def test_no_groups(name, value, failed, reason):
    code, found = answer(**{name: value})
    assert (code, found["problems"]) == (1, ["no process group could be created"])
    says = {
        strategy["name"]: strategy["says"]
        for strategy in found["strategies"]
        if strategy["state"] == "failed"
    }
    assert list(says) == failed
    assert all(reason in said for said in says.values())
    assert found["environment"] == {name: value}


# Variables that matter are shown with their values, however long; no other is.
def test_environment():
    matter = {
        "SLURM_PROCID": "3",
        "TORCHELASTIC_RUN_ID": "run-17",
        "GLOO_SOCKET_IFNAME": "",
        "NCCL_DEBUG_FILE": "x" * 150,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "HYPERCOMM_VERIFY": "[1]",
    }
    others = {"MY_SECRET": "hush-1", "MY_NCCL_KEY": "hush-2", "SLURM_JWT": "hush-3"}
    done = doctor(**matter, **others)
    assert done.returncode == 1  # HYPERCOMM_VERIFY cannot be read
    for name, value in matter.items():
        assert name in done.stdout
        assert value in done.stdout or len(value) > 100
    assert done.stdout.count("x" * 40) >= 2
    assert "(empty)" in done.stdout
    assert not [name for name in others if name in done.stdout]
    assert "hush" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


# The launcher is named, or the mistake in its variables; doctor does not join its job.
def test_in_a_job():
    launcher = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    code, found = answer(**launcher)
    assert (code, found["environment"]) == (0, launcher)
    assert found["launcher"] == "the environment: RANK=3 and WORLD_SIZE=4 of the environment"
    assert "WORLD_SIZE is missing" in answer(RANK="3")[1]["launcher"]


# Without torch, or with one that cannot be loaded, the versions are reported all the same.
def test_without_torch():
    code, found = answer(WITHOUT_TORCH)
    assert code == 1
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith("torch cannot be loaded: ModuleNotFoundError: ")
    assert found["versions"]["torch"] == metadata.version("torch")
    assert ("nccl" in found["versions"], found["gpus"]) == (False, None)
    assert (found["backends"], found["strategies"]) == ({}, [])
    text = doctor(before=WITHOUT_TORCH).stdout
    assert "problem: torch cannot be loaded" in text


# GPUs are named.
def test_gpus(found):
    text = words(doctor(before=WITH_GPUS).stdout)
    assert "2 x Tesla [T4]" in text
    assert found["gpus"] is not None


# Output, logs and warnings within the block are discarded; those after it are not.
def test_quiet(capfd, caplog, recwarn):
    import warnings

    with quiet():
        os.write(1, b"a greeting")
        logging.getLogger("torch").error("an error")
        warnings.warn("a warning", stacklevel=1)
    os.write(1, b"afterwards")
    logging.getLogger("torch").error("another")
    assert capfd.readouterr().out == "afterwards"
    assert [record.message for record in caplog.records] == ["another"]
    assert not recwarn.list


# A process that has a world already is left alone, with exit code 2.
def test_in_a_world(capsys):
    import torch.distributed as dist

    with fake_world(4, rank=1):
        assert main(["doctor"]) == 2
        assert dist.get_world_size() == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "torch.distributed is initialised in this process, with 4 ranks" in err


# Every mistake in a call ends with exit code 2 and nothing on stdout.
@pytest.mark.parametrize("arguments", [("--bogus",), ("tp=2",), ("--all", "yes")])
def test_mistakes(arguments):
    done = doctor(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: hypercomm doctor [OPTIONS]\n")

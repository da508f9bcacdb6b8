"""`hypercomm check` on clusters: in a launched job, with views, with messages of many sizes."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from launched import rank_free
from ports import free_port
from ranks import rank_functions
from test_cli import hypercomm

from hypercomm import RankLayout
from hypercomm.cli import main
from hypercomm.cli.check import collectives
from hypercomm.cli.check.figures import bus_factor
from hypercomm.cli.check.outcome import Outcome
from hypercomm.cli.check.request import COLLECTIVES, Request, Sweep
from hypercomm.cli.check.schema import SCHEMA
from hypercomm.cli.plan.keys import Key
from hypercomm.launch import run_ranks


def misfits(value, schema, where="$"):
    """Where a value is not as a schema says; of JSON schema what this one uses, and no more."""
    known = {"$schema", "title", "description", "type", "properties", "required", "items"}
    known |= {"additionalProperties", "anyOf", "enum", "minimum"}
    assert set(schema) <= known
    if "anyOf" in schema:
        tried = [misfits(value, one, where) for one in schema["anyOf"]]
        return [] if [] in tried else tried[0]
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    types |= {"integer": int, "number": (int, float)}
    is_flag = isinstance(value, bool) and schema["type"] != "boolean"
    if is_flag or not isinstance(value, types[schema["type"]]):
        return [f"{where} is no {schema['type']}"]
    found = [f"{where} is not listed"] if value not in schema.get("enum", [value]) else []
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where} is too small")
    for number, item in enumerate(value if isinstance(value, list) else ()):
        found += misfits(item, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict):
        of, more = schema.get("properties", {}), schema["additionalProperties"]
        found += [
            f"{where}.{name} is missing" for name in schema.get("required", []) if name not in value
        ]
        for name, item in value.items():
            one = of.get(name, more)
            found += (
                [f"{where}.{name} is new"]
                if one is False
                else misfits(item, one, f"{where}.{name}")
            )
    return found


# --groups chooses, of views too; --json prints one object and nothing else, as its schema says. The
# busbw is that of nccl-tests (doc/PERFORMANCE.md there); groups of one have no figures.
@pytest.mark.long
def test_views_and_a_sweep():
    arguments = ("--nproc", "4", "--view", "moe:ep=4,pp=1", "--groups", "dp,ep,cp", "--json")
    done = hypercomm("check", "tp=2,cp=1,dp=-1", *arguments, "--sizes", "1K..5K", "--iters", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert misfits(answer, SCHEMA) == []
    assert (answer["ok"], answer["ranks"], answer["failed"]) == (True, 4, None)
    assert answer["views"] == {"moe": "ep=4,pp=1"}
    *rows, alone = answer["groups"]
    shape = [(row["view"], row["dims"], row["groups"], row["size"]) for row in rows]
    assert shape == [(None, ["dp"], 2, 2), ("moe", ["ep"], 1, 4)]
    for row in rows:
        assert 0 < row["creation_s"] < 10
        assert 0 < row["latency_s"] < 10
        assert row["bandwidth_bytes_per_s"] > 0
        assert row["slowest"]["host"] == socket.gethostname()
        n, sweep = row["size"], row["sweep"]
        factors = dict.fromkeys(COLLECTIVES, (n - 1) / n) | {"all-reduce": 2 * (n - 1) / n}
        factors |= {"broadcast": 1, "send/receive": 1}
        assert [(each["collective"], each["bytes"]) for each in sweep] == [
            (name, size) for name in COLLECTIVES for size in (1024, 4096)
        ]
        for each in sweep:
            algbw = each["bytes"] / each["seconds"]
            assert each["algbw_bytes_per_s"] == pytest.approx(algbw)
            assert each["busbw_bytes_per_s"] == pytest.approx(algbw * factors[each["collective"]])
            assert 0 <= each["slowest"]["rank"] < 4
    assert (alone["dims"], alone["size"], alone["latency_s"], alone["sweep"]) == (
        ["cp"],
        1,
        None,
        [],
    )


# The schema is printed, and what is not as it says is noticed.
def test_the_schema(capsys):
    assert main(["check", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    answer = dict.fromkeys(SCHEMA["properties"]) | {"extra": 1, "ranks": 0}
    found = misfits(answer, SCHEMA)
    assert {"$.extra is new", "$.ranks is too small", "$.layout is no string"} <= set(found)
    assert misfits({}, SCHEMA)[0] == "$.layout is missing"


def figures(rank, seconds, **more):
    timing = {"collective": "all-to-all", "bytes": 4096, "seconds": seconds}
    usual = {"creation": 0.001, "latency": 1e-4, "bandwidth": 1e6 / seconds, "host": f"h{rank}"}
    return usual | {"wrong": [], "lacking": [], "sweep": [timing]} | more


def outcome_of(*told):
    key = Key(None, ("tp",))
    outcome = Outcome(Request(RankLayout.parse(f"tp={len(told)}"), [key], sweep=Sweep((4096,))))
    with outcome.progress():
        for rank, found in enumerate(told):
            outcome.hear((rank, key, "creation"))
            outcome.hear((rank, key, found))
    return outcome


# The slowest rank stands in the tables with its host, and what the backend cannot do is no failure.
def test_the_slowest_rank(capsys):
    lacking = {"lacking": ["reduce-scatter"]}
    outcome = outcome_of(figures(0, 1e-3, **lacking), figures(1, 4e-3, **lacking))
    assert outcome.show(as_json=False) == 0
    first, second = capsys.readouterr().out.split("algbw")
    assert re.search(r"rank 1 on h1 +ok, reduce-scatter not by gloo", first)
    # 4096 B in 4 ms are 0.001024 GB/s, of which half goes over the bus
    assert re.search(r"all-to-all +4096 +4000.0 +0.00102 +0.000512 +rank 1 on h1", second)
    assert "all-reduce, all-gather, broadcast, all-to-all and send/receive are right" in second


# While it runs, a terminal shows what is done, what is at work, and how long the rest may take.
def test_the_live_table():
    outcome = Outcome(Request(RankLayout.parse("tp=2"), [Key(None, ("tp",)), Key(None, ("dp",))]))
    assert outcome._look().plain == "starting 2 gloo ranks"
    one, two = outcome.request.keys
    for key, step in ((one, "creation"), (one, "comparison"), (two, "creation")):
        outcome.hear((0, key, step))
    assert re.fullmatch(
        r"0 of 2 checked - now dp: creation - about \d+ s left",
        outcome._look().renderables[0].plain,
    )


@pytest.mark.parametrize(
    ("collective", "factor"), [("all-reduce", 1.75), ("all-to-all", 0.875), ("send/receive", 1)]
)
def test_bus_factor(collective, factor):
    assert bus_factor(collective, 8) == factor


JOB = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
BROKEN = "cannot be loaded (no such device)"


# Where a launcher's variables tell of a job that cannot be joined, nothing is started. Of ranks
# that would say the same, rank 0 does.
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "inside an allocation, not in a step of it"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "MASTER_ADDR and MASTER_PORT are missing"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "tp=2 needs 2 ranks; the job has 8 (RANK=0 and WORLD_SIZE=8, of the environment)",
        ),
        ({"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "8"}, None),
        # what is wrong with a host is said by the first rank on it
        (JOB | {"RANK": "0"}, "rank 0 on HOST: backend 'gloo' cannot be loaded (no such device)"),
        (JOB | {"RANK": "1"}, "rank 1 on HOST: backend 'gloo' cannot be"),
        (JOB | {"RANK": "1", "LOCAL_RANK": "0"}, "rank 1 on HOST: backend 'gloo' cannot be"),
        (JOB | {"RANK": "1", "LOCAL_RANK": "1"}, None),
    ],
)
def test_a_job_that_cannot_be_joined(environment, message, monkeypatch, capsys):
    for name in set(rank_free()) ^ set(os.environ):
        monkeypatch.delenv(name)
    for name, value in (environment | {"TORCH_CPP_LOG_LEVEL": "FATAL"}).items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(
        "hypercomm.process_groups.torch_internals.why_unavailable", lambda _: BROKEN
    )
    assert main(["check", "tp=2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (message in err.replace(socket.gethostname(), "HOST")) if message else err == ""
    assert message or sum(waited) > 1


# What a backend says that it does not support is no failure; what a dead peer causes is one.
@pytest.mark.parametrize(
    ("error", "is_lacking"),
    [
        (RuntimeError("Backend mpi does not support reduce_scatter"), True),
        (RuntimeError("ProcessGroupGloo: unsupported op"), True),
        (NotImplementedError("all_to_all is not implemented"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), False),
        (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), False),
    ],
)
def test_what_a_backend_lacks(error, is_lacking, monkeypatch):
    def check(_):
        raise error

    monkeypatch.setattr(collectives, "COLLECTIVES", [collectives.Collective("it", check, None)])
    if is_lacking:
        assert collectives.compare(None) == ([], ["it"])
    else:
        with pytest.raises(RuntimeError, match=r"peer|Timed out"):
            collectives.compare(None)


# A rank to which nothing comes as it was sent finds each collective wrong, and no other rank does.
def test_a_rank_that_mishears():
    found = run_ranks(rank_functions.compare_where_one_mishears, 3, args=(1,))
    assert [[text.partition(" gave ")[0] for text in wrong] for wrong in found] == [
        [],
        list(COLLECTIVES),
        [],
    ]
    # ranks 0, 1 and 2 hold 1 0, 2 1 and 3 4
    assert found[1][0] == "all-reduce gave [7, 6], expected [6, 5]"
    assert found[1][2] == "broadcast gave [4, 5], expected [3, 4]"
    # part 1 of ranks 0, 1 and 2 is 2, 4 and 6
    assert found[1][3] == "reduce-scatter gave [13], expected [12]"
    assert found[1][4].endswith("expected [(0, 1), (1, 1), (2, 1)]")
    assert found[1][5] == "send/receive gave [2, 1], expected [1, 0]"


def job_of(ranks, *arguments):
    """Start the ranks of a job as a launcher would, each with its variables."""
    command = [sys.executable, "-m", "hypercomm", "check", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env=rank_free() | {"GLOO_SOCKET_IFNAME": "lo"} | rank, **pipes)
        for rank in ranks
    ]
    return [(*process.communicate(timeout=60), process.wait()) for process in started]


# Ranks of mpirun and of srun join their job; rank 0 shows the result, the others are silent.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_joining(launcher):
    port = str(free_port())
    if launcher == "mpirun":
        ranks = [
            {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for rank in range(2)
        ]
    else:
        ranks = [
            {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
            | {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost"}
            | {"MASTER_PORT": port}
            for rank in range(2)
        ]
    (out, err, code), (silent, silent_err, other) = job_of(ranks, "tp=-1", "--json")
    assert (code, other) == (0, 0), err + silent_err
    answer = json.loads(out)
    assert misfits(answer, SCHEMA) == []
    assert (answer["layout"], answer["ok"], silent) == ("tp=2", True, "")


# A rank that never comes is waited for as long as --timeout says, and the address is named.
@pytest.mark.slow
def test_a_rank_that_never_joins():
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    [(out, err, code)] = job_of(
        [rank | {"MASTER_PORT": str(free_port())}], "tp=2", "--timeout", "2"
    )
    assert code == 1, err
    assert "failed after 0 of 1: rank 1, which was joining 2 at 127.0.0.1, port " in out
    assert "saw a failure, its own or a peer's: " in out
    assert "Traceback" not in err


# Under torchrun a wrong size is said once, by rank 0.
@pytest.mark.clients
def test_a_wrong_size_under_torchrun():
    done = subprocess.run(
        ["torchrun", "--nproc-per-node", "3", "-m", "hypercomm", "check", "tp=2"],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env=rank_free(),
    )
    assert done.returncode != 0
    assert done.stderr.count("tp=2 needs 2 ranks; the job has 3 (RANK=0 and WORLD_SIZE=3") == 1
    assert done.stderr.count("hypercomm: ") == 1

"""Test that the error of each wrong call shows what to type on the command line."""

import importlib.util
import re

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
NO_JOB = "use srun, mpirun or torchrun --no-python" if HAS_TORCH else "needs torch: pip install"

KINDS = "--on must be GPUs per host (8, '8,72' or 'host=8,domain=72'), a hostfile, a node list such"
SIZES = "write positive sizes, or -1, and separate sizes with commas, as in 'tp=2,dp=4'"
WORLD_SIZE = "give it, as in 'dp=2', or the number of ranks, as in --world-size 16"
LAUNCH_FILE = "give the path of a launch file, or sizes, as in tp=8,dp=4"

FILES = {
    "hosts": "a slots=x\n",
    "twice": "a slots=2\na slots=2\n",
    "broken.yaml": "a: [\n",
    "unknown.sh": "echo hello\n",
    "typo.sh": "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size 2 "
    "--contxt-parallel-size 2",
    "experts.sh": "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size 2 "
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    "ranks.sh": "python train.py --tensor-model-parallel-size 2",
    "exists.svg": "<svg/>",
}

PYTHON_ARGUMENTS = re.compile(
    r"\b(world_size|overlapped|traffic=|weights=|groups=|on=|force=|along=|nprocs=|RankLayout)"
)

CALLS = [
    # ---- commands, arguments and options that do not exist, or are missing
    ("pln tp=2", "No such command 'pln'; did you mean 'plan'?"),
    ("watch", "the commands are plan, draw, place, diff, check, doctor, blame"),
    ("--verison", "Did you mean '--version'?"),
    ("plan", "Missing argument 'SIZES'. For example: hypercomm plan tp=8,cp=2,dp=64"),
    ("draw", "For example: hypercomm draw tp=8,dp=4 -o layout.svg"),
    ("check", "For example: hypercomm check tp=2,cp=2,dp=2"),
    ("diff tp=2", "Missing argument 'AFTER'. For example: hypercomm diff tp=2,dp=4 tp=4,dp=2"),
    ("blame", "Missing argument 'FOLDER'. For example: hypercomm blame hypercomm_watch"),
    (
        "place tp=8,dp=4",
        "Missing option '--on'. For example: hypercomm place tp=8,dp=4,pp=4 --on 8",
    ),
    ("place tp=8,dp=4 --on", "For example: hypercomm place tp=8,dp=4,pp=4 --on 8"),
    ("draw tp=2 tp=2 tp=2", "For example: hypercomm draw tp=8,dp=4 -o layout.svg"),
    ("doctor now", "unexpected extra argument (now). For example: hypercomm doctor"),
    ("doctor --jsn", "Did you mean '--json'?"),
    ("plan tp=2 --gpus-per-node 8", "; did you mean '--on 8'?"),
    ("place tp=2 --hostfile hosts", "; did you mean '--on FILE'?"),
    ("plan tp=2 --nprocs 8", "; did you mean '--world-size'?"),
    ("plan --tp 2 --dp 4", "No such option '--tp'; write sizes as tp=2,dp=4"),
    ("place --tensor-model-parallel-size=2 --on 8", "-size'; write sizes as tp=2,dp=4"),
    ("diff --dp 4", "No such option '--dp'; write sizes as tp=2,dp=4"),
    ("blame --tp 2", "No such option '--tp'"),
    ("check tp=2 --on 8", "No such option '--on'; plan, draw and place have this option"),
    # ---- sizes
    ("plan tp8,dp4", "did you mean 'tp=8,dp=4'?"),
    ("check tp8", "did you mean 'tp=8'?"),
    ("place tp8,dp4 --on 8", "did you mean 'tp=8,dp=4'?"),
    ("plan tp=2 dp=4", SIZES),
    ("plan tp:2,dp:4", SIZES),
    ("plan 2,4", SIZES),
    ("plan [2,4]", SIZES),
    ("plan tp=two", SIZES),
    ("plan tp=8,dp=0", SIZES),
    ("plan tp=2,tp=2", "name each dim once"),
    ("plan tp=2000000000", "has 2,000,000,000 ranks; plan shows up to 16,777,216"),
    # ---- the number of ranks
    ("plan tp=8,dp=-1", WORLD_SIZE),
    ("draw tp=8,dp=-1", WORLD_SIZE),
    ("check tp=8,dp=-1", "or the number of ranks, as in --nprocs 16"),
    (
        "place tp=8,dp=-1 --on 8",
        "or --world-size, or name the hosts, as in --on 'node[1-4]' --on 8",
    ),
    ("plan tp=3,dp=-1 --world-size 8", "6 or 9; --world-size is 8; tp=2 would fit"),
    ("plan tp=2,dp=2 --world-size 8", "--world-size is 8; tp=4 or dp=4 would fit"),
    ("place tp=2,dp=2 --on 4 --world-size 8", "needs 4 ranks; --world-size is 8"),
    ("draw tp=3 --world-size 8", "needs 3 ranks; --world-size is 8"),
    ("plan tp=2 --world-size 0", "0 is not in the range x>=1"),
    ("plan tp=2 --world-size many", "'many' is not a valid integer"),
    ("check tp=3 --nprocs 4", "tp=3 needs 3 ranks; --nprocs is 4"),
    ("check tp=2 --view ep=3", "ep=3 needs 3 ranks; the layout tp=2 has 2"),
    ("diff tp=2,dp=-1 tp=4,dp", "give all sizes of one layout, or the number of ranks with --w"),
    ("diff tp=8 tp=3,dp", "multiple of 3 ranks, for example 6 or 9; the other layout has 8"),
    ("diff tp=2 dp=33554432", "'after' has 33,554,432 ranks; at most 16,777,216 can be compared"),
    ("place tp=4,dp --on n[1-3] --on 2", "for example 4 or 8; the world has 6"),
    # ---- ranks, groups and views
    ("plan tp=2 --rank 2", "rank 2 is not in layout tp=2, which has ranks 0..1"),
    ("plan tp=2 --rank two", "'two' is not a valid integer"),
    ("plan tp=2 --groups tp,", "write it like 'tp,dp+cp'"),
    ("plan tp=2 --groups tp,tp", "list them once"),
    ("check tp=2 --groups tp,pp", "unknown dim 'pp'; this layout has dims ('tp',)"),
    ("plan tp=2,dp=2 --groups pt", "; did you mean 'tp'?"),
    ("plan tp=2 --view expert", "--view 'expert' has no sizes; write expert:ep=2,rest=-1"),
    ("plan tp=2 --view :ep=2", "has no name before ':'; write expert:ep=4,rest=-1"),
    # ---- files and folders
    ("plan nosuch.sh", f"No such file or directory; {LAUNCH_FILE}"),
    ("diff nosuch.yaml tp=2", f"No such file or directory; {LAUNCH_FILE}"),
    ("plan empty/", f"'empty' is a folder; {LAUNCH_FILE}"),
    ("plan .", f"'.' is a folder; {LAUNCH_FILE}"),
    ("draw empty", f"'empty' is a folder; {LAUNCH_FILE}"),
    ("check .", "'.' is a folder, and check takes sizes, as in hypercomm check tp=2,dp=4"),
    ("check nosuch.sh", "there is no file 'nosuch.sh', and check takes sizes, as in hypercomm che"),
    (
        "check experts.sh",
        (
            "check takes sizes, and 'experts.sh' is a launch file; write hypercomm check "
            "tp=2,cp=1,dp=4,pp=1 --view expert:expt_tp=1,ep=4,expt_dp=2,pp=1"
        ),
    ),
    ("check ranks.sh --nprocs 4", "write hypercomm check tp=2,cp=1,dp=2,pp=1"),
    ("check typo.sh", "'hypercomm plan typo.sh' shows problems of the file"),
    (
        "check ranks.sh",
        "no layout can be read from 'ranks.sh'; 'hypercomm plan ranks.sh' shows its",
    ),
    ("plan broken.yaml", "broken.yaml is not valid yaml: while parsing"),
    ("plan unknown.sh", "give the sizes, as in tp=8,dp=4"),
    ("draw tp=2 -o nodir/a.svg", "there is no folder 'nodir'; create it first"),
    ("draw tp=2 -o exists.svg", "'exists.svg' exists; --force replaces it"),
    ("draw tp=2 -o grid.pdf", "'grid.pdf' must end in .svg or .png"),
    (
        "blame nodir",
        "No such file or directory; give the folder that the ranks wrote their dumps to",
    ),
    ("blame hosts", "Not a directory; give the folder that the ranks wrote their dumps to"),
    ("blame empty", "their names end with the rank: hypercomm_watch_3.json"),
    ("blame empty --layout tp=2,dp", "the size of dim 'dp' is unspecified; give it, as in 'dp=2'"),
    # ---- machines
    ("place tp=2 --on nope", KINDS),
    ("place tp=2 --on nodir/hosts", KINDS),
    ("place tp=2 --on hosts", "write each host once, as 'node01 slots=8' or 'node01:8'"),
    ("place tp=2 --on twice", "write each host once, as 'node01 slots=8' or 'node01:8'"),
    ("place tp=2 --on 0", "the number of GPUs in '0' must be at least 1"),
    ("draw tp=2,dp=4 --on 0", "the number of GPUs in '0' must be at least 1"),
    ("place tp=2 --on 8,12", "16 GPUs would work"),
    ("place tp=2 --on hots=2", "did you mean 'host'?"),
    ("place tp=2 --on node[1-", "write it like 'node[01-09]'"),
    ("place tp --on n1,n2", "add the number of GPUs per host, as in --on 8"),
    (
        "place tp=3 --on nope --on nop",
        "was read as the host of each rank, because its values are not files",
    ),
    ("place tp=2 --on 8 --on live", "--on live cannot be combined with other --on values"),
    ("place tp=2 --on live", NO_JOB),
    ("plan tp=2,dp=4 --on n1,n2 --on 3", "8 ranks need more than 6 GPUs"),
    ("plan tp=2 --on domain=8", "add the GPUs per host, as in --on 8"),
    # ---- traffic
    ("place tp=2,dp=2 --on 8 --overlap dp", "--overlap needs --traffic"),
    ("place tp=2,dp=2 --on 8 --traffic tp=1 --overlap dp", "add it to --traffic"),
    ("place tp=2 --on 8 --traffic tp=much", "in --traffic cannot be read; write 'tp=40G,dp=6.5G'"),
    ("place tp=2 --on 8 --weights host=a", "in --weights cannot be read; write 'domain=1,leaf=7'"),
    ("place tp=2 --on 8 --weights leaf=1", "this machine has host, and a weight is a number from"),
    # ---- pictures and checks
    ("draw tp=2 --groups pp", "unknown dim 'pp'; this layout has dims ('tp',)"),
    ("draw tp=2 tp=4 --view e:ep=2", "--view applies to a layout; leave it out for a change"),
    ("draw tp=2 tp=4 --groups tp", "--groups applies to a layout; leave it out for a change"),
    (
        "draw tp=2,dp=4 tp=4,dp=2 --to dp=8",
        "--to requests a picture of a mapping; give only one of them",
    ),
    ("draw tp=2 --to tp=2", "add it, as in 'tp=2,dp=1'"),
    ("draw tp=2,dp=4 --to dp=3", "for example 3 or 6 at the source"),
    ("check tp=2 --timeout 0", "0.0 is not in the range 0<x<=1000000.0"),
    ("check tp=2 --backend bogus", "unknown backend 'bogus'; this torch knows ["),
    ("check tp=2 --backend nccl", "backend 'nccl' "),  # not built in, or without a GPU
]


@pytest.mark.parametrize(("call", "answer"), CALLS, ids=[call for call, _ in CALLS])
def test_wrong_call(call, answer, in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = in_process(*call.split())
    said = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert answer in said
    assert "Traceback" not in said
    assert PYTHON_ARGUMENTS.search(said) is None
    assert {path.name for path in tmp_path.iterdir()} == {"empty", *FILES}
    assert (tmp_path / "exists.svg").read_text(encoding="utf-8") == FILES["exists.svg"]

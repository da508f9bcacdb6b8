"""Compare read_config() on launch files with the ranks that upstream computes, and by hand."""

import math
import re
import sys

import numpy as np
import pytest
from launch_inputs import TORCHRUN, layouts_of, load, read
from megatron_oracle import parallel_state
from processes import run_python
from torch.distributed.device_mesh import init_device_mesh

from hypercomm import RankLayout, megatron_grids, read_config, torchtitan_grids
from hypercomm.errors import HyperCommError, LayoutError
from hypercomm.testing import fake_world


def as_sets(groups):
    return {tuple(map(int, group)) for group in groups}


def of(layout, *dims):
    return as_sets(layout.groups(*dims))


def lanes(ranks, axis):
    """Return the groups along one or several axes of an array of ranks."""
    axes = (axis,) if isinstance(axis, int) else axis
    moved = np.moveaxis(ranks, axes, range(-len(axes), 0))
    return as_sets(moved.reshape(-1, math.prod(ranks.shape[one] for one in axes)))


# ---- the groups of upstream's code --------------------------------------------------------------


def check_megatron(config, module, world, tp=1, pp=1, cp=1, ep=1, etp=None, order=""):
    """Check against the RankGenerator of megatron-core."""
    dense, expert = config.layouts[module], config.layouts[f"{module}:expert"]
    etp = tp if etp is None else etp
    shared = {"pp": pp, "order": order or "tp-cp-ep-dp-pp"}
    theirs = parallel_state.RankGenerator(**shared, tp=tp, cp=cp, ep=1, dp=world // (tp * cp * pp))
    for dims in ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-cp-dp"):
        assert of(dense, *dims.split("-")) == as_sets(theirs.get_ranks(dims)), dims
    theirs = parallel_state.RankGenerator(
        **shared, tp=etp, cp=1, ep=ep, dp=world // (etp * ep * pp)
    )
    ours = {"tp": "expt_tp", "dp": "expt_dp"}
    for dims in ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp"):
        names = [ours.get(dim, dim) for dim in dims.split("-")]
        assert of(expert, *names) == as_sets(theirs.get_ranks(dims)), dims


def check_meshes(config, module, world, meshes):
    """Check that each dim of a layout has the groups of the dim of torch's DeviceMesh."""
    with fake_world(world):
        for view, (names, shape) in meshes.items():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            layout = config.layouts[module if view == "base" else f"{module}:{view}"]
            assert {*layout.dim_names} == {*names}
            for axis, name in enumerate(names):
                assert of(layout, name) == lanes(mesh.mesh.numpy(), axis), (view, name)


def check_titan(config, module, world, dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1):
    """Check against the meshes of torchtitan, as in its `build_mesh`."""
    inner = world // (pp * dp_replicate)
    shard = inner // (cp * tp)
    assert dp_shard in (-1, shard)
    meshes = {
        "dataloading": (("pp", "batch", "cp", "tp"), (pp, dp_replicate * shard, cp, tp)),
        "dense": (("pp", "dp_replicate", "fsdp", "tp"), (pp, dp_replicate, shard * cp, tp)),
        "sparse": (("pp", "dp_replicate", "efsdp", "ep"), (pp, dp_replicate, inner // ep, ep)),
    }
    check_meshes(config, module, world, meshes)


def check_vllm(config, module, world, tp=1, pp=1, dp=1, engines=1, expert=False):
    """Check against vLLM: ranks have the shape (engines, dp, pp, tp). A group is along one axis."""
    layout = config.layouts[module]
    ranks = np.arange(world).reshape(engines, dp, pp, tp)
    for axis, name in ((1, "dp"), (2, "pp"), (3, "tp")):
        assert of(layout, name) == lanes(ranks, axis), name
    if expert:
        assert of(config.layouts[f"{module}:expert"], "ep") == lanes(ranks, (1, 3))


def check_sglang(config, module, world, tp=1, pp=1, ep=1, attn_dp=1, engines=1):
    """Check against SGLang: each stage has tp ranks, which attention and experts divide."""
    ranks = np.arange(world).reshape(engines, pp, tp)
    assert of(config.layouts[module], "tp") == lanes(ranks, 2)
    assert of(config.layouts[module], "pp") == lanes(ranks, 1)
    if attn_dp > 1:  # a group of attention has neighbouring ranks
        attention = ranks.reshape(engines, pp, attn_dp, tp // attn_dp)
        assert of(config.layouts[f"{module}:attention"], "attn_tp") == lanes(attention, 3)
    if ep > 1:
        experts = ranks.reshape(engines, pp, ep, tp // ep)
        assert of(config.layouts[f"{module}:expert"], "ep") == lanes(experts, 2)


CHECKS = {
    "Megatron": check_megatron,
    "Mesh": check_meshes,
    "Titan": check_titan,
    "VLLM": check_vllm,
    "SGLang": check_sglang,
}

UPSTREAM = load("launch_inputs.toml")["input"]
PUBLIC = load("public_files.toml")["file"]
CASES = [
    (row, text)
    for row in [*UPSTREAM, *PUBLIC, *load("cases.toml")["case"]]
    for text in row.get("texts", [row.get("text")])
]


NAMES = [row.get("path") or re.sub(r"[^ -~]+", " ", text)[-60:] for row, text in CASES]


def check_config(row, text, config, folder):
    """Check a configuration against the fields of a row, which `cases.toml` describes."""
    found = layouts_of(config)
    assert config.framework == row.get("framework", config.framework)
    assert config.world_size == row.get("ranks", row.get("world", config.world_size))
    layouts = row.get("layouts", found)
    assert {name: found.get(name) for name in layouts} == layouts
    named = [name for name in found if ":" not in name and "@" not in name]
    assert {*named} == {name.partition("@")[0] for name in layouts if ":" not in name}
    if modules := row.get("modules"):  # a module without sizes has no layout
        assert {*named} == {name for name, sizes in modules.items() if sizes}
        for name in named:
            sizes = dict(modules[name])
            check = CHECKS[sizes.pop("family")]
            check(config, name, row.get("world", config.world_size), **sizes)
    if not found:
        with pytest.raises(LayoutError, match="no layout was found for module 'training': "):
            config.grids()
    problems = row.get("problems", [])
    assert len(config.problems) == len(problems), config.problems
    for problem, part in zip(config.problems, problems, strict=True):
        assert part in problem
    for size, source in row.get("sources", {}).items():
        assert str(config.source(size)).startswith(source)
    for name, choices in row.get("choices", {}).items():
        for choice, tp in choices.items():
            decided = read(row | {"variables": {name: choice}}, folder, text)
            assert [views.base.size_of("tp") for views in decided.views.values()] == [tp]
            assert decided.problems == ()


# The layouts of a file match the ranks that upstream's code computes from its sizes, or were read
# from the file by hand. A file that does not determine its sizes has a problem. Characters that a
# terminal interprets are replaced.
@pytest.mark.parametrize(("row", "text"), CASES, ids=NAMES)
def test_files(row, text, tmp_path, monkeypatch):
    for name in ("NNODES", "NUM_NODES", "GPUS_PER_NODE", "TP", "PP", "EP", "CP", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    try:
        config = read(row, tmp_path, text)
    except HyperCommError as error:
        shown = str(error)
        assert row.get("refused") or re.search(row["error"], shown), shown
    else:
        shown = str(config)
        assert "error" not in row
        if row.get("refused"):
            assert config.problems
        else:
            check_config(row, text, config, tmp_path)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown), shown


def test_files_are_many():
    for rows, most, repositories in ((UPSTREAM, 25, 8), (PUBLIC, 60, 15)):
        assert len({(row["repository"], row["path"]) for row in rows}) == len(rows) >= most
        assert len({row["repository"] for row in rows}) >= repositories
    assert all(re.fullmatch(r"[0-9a-f]{40}", row["commit"]) for row in PUBLIC)


# The files that were judged by hand before they were read: modules have the ranks that the file
# asks for, each its own or all of them, and views have the ranks of their module.
def test_held_out_files_are_consistent():
    rows = load("held_out.toml")["file"]
    assert len(rows) >= 60
    assert len({row["repository"] for row in rows}) >= 15
    for row in rows:
        sizes = {name: RankLayout(text).size for name, text in row.get("layouts", {}).items()}
        assert ("refused" in row) == (not sizes)
        assert all(size == sizes[name.partition(":")[0]] for name, size in sizes.items())
        modules = [size for name, size in sizes.items() if ":" not in name]
        if "ranks" in row:
            assert max(modules) <= row["ranks"] <= sum(modules), row["path"]


TITAN = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 8, "pp": 1, "ep": 1}


# The layouts have the same groups as the meshes of torchtitan's code.
@pytest.mark.clients
@pytest.mark.parametrize(
    "sizes", [TITAN, {**TITAN, "dp_replicate": 2, "cp": 2, "tp": 2, "ep": 8}], ids=str
)
def test_layouts_match_torchtitans_code(sizes):
    named = "pip install tyro && pip install --no-deps torchtitan spmd_types"
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", reason=named)
    text = f"""
[parallelism]
data_parallel_replicate_degree = {sizes["dp_replicate"]}
context_parallel_degree = {sizes["cp"]}
tensor_parallel_degree = {sizes["tp"]}
expert_parallel_degree = {sizes["ep"]}
"""
    config = read_config(text, 32)
    with fake_world(32):
        theirs = dims.ParallelDims(**sizes, world_size=32, spmd_backend="partial_dtensor")
        theirs.build_mesh()
        for view in ("dataloading", "dense", "sparse"):
            mesh = theirs._global_meshes[view]
            for axis, name in enumerate(mesh.mesh_dim_names):
                found = of(config.layouts[f"training:{view}"], name)
                assert found == lanes(mesh.mesh.numpy(), axis), (view, name)


# The expert parallel groups match the lists that DeepSpeed's function returns.
@pytest.mark.clients
def test_expert_ranks_match_deepspeeds_code():
    groups = pytest.importorskip("deepspeed.utils.groups", reason="pip install deepspeed")
    config = read_config('{"zero_optimization": {"stage": 1}, "autoep_size": 4}', 16)
    theirs, data = groups._get_expert_parallel_ranks(16, 1, 4)
    assert of(config.layouts["training:expert"], "ep") == as_sets(theirs)
    assert of(config.layouts["training:expert"], "expt_dp") == as_sets(data)


# grids() makes the same grids as the presets.
def test_grids_match_the_megatron_preset():
    flags = (
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1"
    )
    config = read_config(f"torchrun --nnodes 2 --nproc-per-node 8 train.py {flags}")
    ours = config.grids()
    preset = megatron_grids(tp=2, ep=4, expt_tp=1, world_size=16)
    assert ours["training"].layout == preset["training"].layout
    assert ours["training"].view("expert").layout == preset["training"].view("expert").layout


def test_grids_match_the_torchtitan_preset():
    config = read_config(
        "[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 4", 16
    )
    ours = config.grids()
    preset = torchtitan_grids(tp=2, ep=4, world_size=16)
    assert ours["training"].layout == preset["training"].layout
    assert ours["training"].views == preset["training"].views


# A size has its value, key, text, file and line.
def test_source_of_a_size(tmp_path):
    text = f"TP=${{TP:-4}}\n\n{TORCHRUN} $TP"
    config = read({"file": "run.sh"}, tmp_path, text)
    tp = config.source("tp")
    assert (tp.value, tp.key, tp.raw) == (4, "--tensor-model-parallel-size", "$TP")
    assert (tp.file, tp.line, str(tp)) == ("run.sh", 3, "run.sh:3 --tensor-model-parallel-size $TP")
    assert (config.source("cp").line, str(config.source("cp"))) == (0, "default")
    with pytest.raises(KeyError, match="no size 'xp'"):
        config.source("xp")


# A variable that the script does not set is read from the environment, as in the shell.
def test_variables_of_the_environment(monkeypatch):
    text = f"{TORCHRUN} ${{TP:-2}}"
    assert str(read_config(text).layouts["training"]) == "tp=2,cp=1,dp=4,pp=1"
    monkeypatch.setenv("TP", "8")
    assert str(read_config(text).layouts["training"]) == "tp=8,cp=1,dp=1,pp=1"


# Plans of a million ranks and of a launch file take half a second on a quiet machine, process start
# included, and do not import torch. The limit is of CPU time, because other tests run. Without a
# launch file, no reader of files is loaded.
def test_what_plan_imports(tmp_path):
    (tmp_path / "run.sh").write_text(f"{TORCHRUN} 2")
    program = (
        "import sys, resource; sys.modules['torch'] = None\n"
        "from hypercomm.cli import main\n"
        "main(['plan', 'tp=8,cp=2,dp=1024,pp=64'])\n"
        "readers = ('tree_sitter', 'rich', 'hypercomm.tools.launch_files.config')\n"
        "print([name for name in readers if name in sys.modules])\n"
        f"code = main(['plan', {str(tmp_path / 'run.sh')!r}])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('tree_sitter' in sys.modules, used.ru_utime + used.ru_stime)\n"
        "sys.exit(code)"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "1,048,576 ranks" in done.stdout
    assert "\n[]\n" in done.stdout
    assert "tp=2,cp=1,dp=4,pp=1: 8 ranks" in done.stdout
    is_loaded, seconds = done.stdout.split()[-2:]
    assert (is_loaded, float(seconds) < 2) == ("True", True)


# Nothing in a launch file is run or imported.
def test_nothing_in_a_file_is_run(tmp_path):
    mark = tmp_path / "mark"
    text = f"""
touch {mark}
eval "touch {mark}"
X=$(touch {mark}; echo 8)
Y=`touch {mark}`
torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size 2
"""
    (tmp_path / "run.sh").write_text(text)
    config = read_config(tmp_path / "run.sh")
    assert str(config.layouts["training"]) == "tp=2,cp=1,dp=4,pp=1"
    yaml = f"!!python/object/apply:os.system ['touch {mark}']: 1\ntensor_model_parallel_size: 2\n"
    (tmp_path / "a.yaml").write_text(yaml)
    read_config(tmp_path / "a.yaml", 8)
    assert not mark.exists()
    assert "train" not in sys.modules


# print() shows the table of `hypercomm plan`, and repr() is one line. Neither shows an object's
# address.
def test_text_of_a_config():
    config = read_config("torchrun --nproc-per-node 8 t.py --tensor-model-parallel-size 3")
    lines = str(config).splitlines()
    assert lines[0] == "Megatron-LM; 8 ranks"
    assert "training.tp          3  line 1 --tensor-model-parallel-size 3" in lines
    assert lines[-1].startswith("problem: training: tp=3,pp=1,cp=1,dp=-1 needs a multiple of 3")
    assert repr(config) == "<LaunchConfig: Megatron-LM; 8 ranks; 1 problem>"
    assert " at 0x" not in str(config) + repr(config)
    engine = read_config("vllm serve m -tp 4")
    assert repr(engine) == "<LaunchConfig: vLLM; 4 ranks; inference tp=4,pp=1,dp=1>"

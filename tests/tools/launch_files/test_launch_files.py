"""Compare read_config() on parts of real launch files with the ranks that upstream computes."""

import math
import re
import sys

import numpy as np
import pytest
from launch_inputs import INPUTS, VLLM, Input, Megatron, Mesh, SGLang, Titan, load
from megatron_oracle import parallel_state
from processes import run_python
from torch.distributed.device_mesh import init_device_mesh

from hypercomm import RankLayout, megatron_grids, read_config, torchtitan_grids
from hypercomm.errors import LayoutError
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


def check_megatron(config, module, wanted, world):
    dense, expert = config.layouts[module], config.layouts[f"{module}:expert"]
    etp = wanted.tp if wanted.etp is None else wanted.etp
    shared = {"pp": wanted.pp, "order": wanted.order}
    theirs = parallel_state.RankGenerator(
        **shared, tp=wanted.tp, cp=wanted.cp, ep=1, dp=world // (wanted.tp * wanted.cp * wanted.pp)
    )
    for dims in ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-cp-dp"):
        assert of(dense, *dims.split("-")) == as_sets(theirs.get_ranks(dims)), dims
    theirs = parallel_state.RankGenerator(
        **shared, tp=etp, cp=1, ep=wanted.ep, dp=world // (etp * wanted.ep * wanted.pp)
    )
    ours = {"tp": "expt_tp", "dp": "expt_dp"}
    for dims in ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp"):
        names = [ours.get(dim, dim) for dim in dims.split("-")]
        assert of(expert, *names) == as_sets(theirs.get_ranks(dims)), dims


def titan_meshes(wanted, world):
    """Return the names and shapes of torchtitan's meshes, as in its `build_mesh`."""
    inner = world // (wanted.pp * wanted.dp_replicate)
    shard = inner // (wanted.cp * wanted.tp)
    batch = wanted.dp_replicate * shard
    return {
        "dataloading": (("pp", "batch", "cp", "tp"), (wanted.pp, batch, wanted.cp, wanted.tp)),
        "dense": (
            ("pp", "dp_replicate", "fsdp", "tp"),
            (wanted.pp, wanted.dp_replicate, shard * wanted.cp, wanted.tp),
        ),
        "sparse": (
            ("pp", "dp_replicate", "efsdp", "ep"),
            (wanted.pp, wanted.dp_replicate, inner // wanted.ep, wanted.ep),
        ),
    }


def check_meshes(config, module, meshes, world):
    """Check that each dim of a layout has the groups of the dim of torch's DeviceMesh."""
    with fake_world(world):
        for view, (names, shape) in meshes.items():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            layout = config.layouts[f"{module}:{view}" if view else module]
            assert {*layout.dim_names} == {*names}
            for axis, name in enumerate(names):
                assert of(layout, name) == lanes(mesh.mesh.numpy(), axis), (view, name)


def check_vllm(config, module, wanted, world):
    """Check against vLLM: ranks have the shape (engines, dp, pp, tp). A group is along one axis."""
    layout = config.layouts[module]
    ranks = np.arange(world).reshape(wanted.engines, wanted.dp, wanted.pp, wanted.tp)
    for axis, name in ((1, "dp"), (2, "pp"), (3, "tp")):
        assert of(layout, name) == lanes(ranks, axis), name
    if wanted.expert:
        assert of(config.layouts[f"{module}:expert"], "ep") == lanes(ranks, (1, 3))


def check_sglang(config, module, wanted, world):
    """Check against SGLang: each stage has tp ranks, which attention and experts divide."""
    engines = np.arange(world).reshape(wanted.engines, wanted.pp, wanted.tp)
    assert of(config.layouts[module], "tp") == lanes(engines, 2)
    assert of(config.layouts[module], "pp") == lanes(engines, 1)
    stages = [stage for engine in engines for stage in engine]
    if wanted.attn_dp > 1:
        size = wanted.tp // wanted.attn_dp
        attn_tp = [
            stage[at * size : (at + 1) * size] for stage in stages for at in range(wanted.attn_dp)
        ]
        assert of(config.layouts[f"{module}:attention"], "attn_tp") == as_sets(attn_tp)
    if wanted.ep > 1:
        moe_tp = wanted.tp // wanted.ep
        experts = [stage[at::moe_tp] for stage in stages for at in range(moe_tp)]
        assert of(config.layouts[f"{module}:expert"], "ep") == as_sets(experts)


CHECKS = {
    Megatron: check_megatron,
    Mesh: lambda config, module, wanted, world: check_meshes(config, module, wanted.meshes, world),
    Titan: lambda config, module, wanted, world: check_meshes(
        config, module, titan_meshes(wanted, world), world
    ),
    VLLM: check_vllm,
    SGLang: check_sglang,
}


# The layouts of a real file match the ranks that upstream's code computes from its sizes.
@pytest.mark.parametrize("given", INPUTS, ids=lambda given: given.name)
def test_layouts_match_upstream(given: Input, tmp_path, monkeypatch):
    for name in ("NNODES", "NUM_NODES", "GPUS_PER_NODE", "TP", "PP", "EP", "CP", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / given.path.rpartition("/")[2].replace(".md", ".sh")
    file.write_text(given.text)
    config = read_config(file, given.given_world)
    assert config.framework == given.framework
    assert config.world_size == (given.total or given.world)
    assert {*config.views} == {name for name, wanted in given.modules.items() if wanted}
    for module, wanted in given.modules.items():
        if wanted is not None:
            CHECKS[type(wanted)](config, module, wanted, given.world)
    assert len(config.problems) == len(given.problems)
    for problem, part in zip(config.problems, given.problems, strict=True):
        assert part in problem


def test_number_of_inputs():
    assert len(INPUTS) >= 25
    assert len({given.repository for given in INPUTS}) >= 8
    assert len({given.name for given in INPUTS}) == len(INPUTS)


# The layouts have the same groups as the meshes of torchtitan's code.
@pytest.mark.clients
@pytest.mark.parametrize("sizes", [Titan(tp=8), Titan(dp_replicate=2, cp=2, tp=2, ep=8)], ids=str)
def test_layouts_match_torchtitans_code(sizes):
    named = "pip install tyro && pip install --no-deps torchtitan spmd_types"
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", reason=named)
    text = f"""
[parallelism]
data_parallel_replicate_degree = {sizes.dp_replicate}
context_parallel_degree = {sizes.cp}
tensor_parallel_degree = {sizes.tp}
expert_parallel_degree = {sizes.ep}
"""
    config = read_config(text, 32)
    with fake_world(32):
        theirs = dims.ParallelDims(**vars(sizes), world_size=32, spmd_backend="partial_dtensor")
        theirs.build_mesh()
        for view in ("dataloading", "dense", "sparse"):
            mesh = theirs._global_meshes[view]
            for axis, name in enumerate(mesh.mesh_dim_names):
                found = of(config.layouts[f"training:{view}"], name)
                assert found == lanes(mesh.mesh.numpy(), axis), (view, name)


PUBLIC = load("public_files.toml")["file"]


# The sizes of public files were read from them by hand. A file that does not determine its sizes
# has a problem.
@pytest.mark.parametrize("given", PUBLIC, ids=lambda given: given["path"])
def test_public_files(given, tmp_path):
    file = tmp_path / f"run.{given['format']}"
    file.write_text(given["text"])
    if given.get("refused"):
        try:
            problems = read_config(file).problems
        except LayoutError as error:
            problems = (str(error),)
        assert problems
        return
    config = read_config(file, given.get("world_size"))
    found = {re.sub(r"@\d+", "", name): str(layout) for name, layout in config.layouts.items()}
    assert {name: found.get(name) for name in given["layouts"]} == given["layouts"]
    assert {name for name in found if ":" not in name} <= {*given["layouts"]}
    assert len(config.problems) == ("problem" in given)
    assert all(given["problem"] in text for text in config.problems)


def test_public_files_are_many():
    assert len(PUBLIC) >= 60
    assert len({given["repository"] for given in PUBLIC}) >= 15
    assert all(re.fullmatch(r"[0-9a-f]{40}", given["commit"]) for given in PUBLIC)


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


# vLLM distributes experts over dp and tp. SGLang distributes them inside tp.
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "vllm serve m --tensor-parallel-size=2 -dp 4 --enable-expert-parallel",
            VLLM(2, 1, 4, expert=True),
        ),
        ("vllm serve m -tp 4 -pp 2", VLLM(4, 2)),
        ("python -m sglang.launch_server --tp 8 --ep 4 --pp 2", SGLang(8, 2, 4)),
        (
            "sglang serve m --tp-size 8 --dp-size 4 --enable-dp-attention --ep-size 2",
            SGLang(8, 1, 2, 4),
        ),
    ],
)
def test_inference_engines(text, wanted):
    config = read_config(text)
    CHECKS[type(wanted)](config, "inference", wanted, config.world_size)
    assert config.problems == ()


# The expert parallel groups match the lists that DeepSpeed's function returns.
@pytest.mark.clients
def test_expert_ranks_match_deepspeeds_code():
    groups = pytest.importorskip("deepspeed.utils.groups", reason="pip install deepspeed")
    config = read_config('{"zero_optimization": {"stage": 1}, "autoep_size": 4}', 16)
    theirs, data = groups._get_expert_parallel_ranks(16, 1, 4)
    assert of(config.layouts["training:expert"], "ep") == as_sets(theirs)
    assert of(config.layouts["training:expert"], "expt_dp") == as_sets(data)


def test_hpz_groups_are_consecutive_ranks():
    text = '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}'
    config = read_config(text, 32)
    assert of(config.layouts["training:hpz"], "hpz") == as_sets(np.arange(32).reshape(4, 8))
    assert config.problems == ()


# Megatron's flag that puts pp before dp is read.
def test_order_of_dims():
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    config = read_config(f"torchrun --nproc-per-node 8 train.py {flags} --use-tp-pp-dp-mapping")
    check_megatron(config, "training", Megatron(tp=2, pp=2, order="tp-cp-ep-pp-dp"), 8)
    assert config.problems == ()


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


# verl with Megatron is recognised by the name of its configuration, and torchtitan is recognised by
# its flags.
def test_frameworks_are_recognised():
    text = "python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer"
    rollout = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    config = read_config(f"{text} {rollout} trainer.n_gpus_per_node=8 trainer.nnodes=1")
    check_megatron(config, "actor", Megatron(), 8)
    text = "NGPU=8 ./run_train.sh --parallelism.tensor_parallel_degree 4"
    check_meshes(read_config(text), "training", titan_meshes(Titan(tp=4), 8), 8)


# Each size names its file, line, key and text. For a size that is not in the file, the default is
# used.
def test_source_of_a_size(tmp_path):
    file = tmp_path / "run.sh"
    launch = "torchrun --nproc_per_node 8 train.py"
    file.write_text(f"TP=${{TP:-4}}\n\n{launch} \\\n  --tensor-model-parallel-size $TP\n")
    config = read_config(str(file))
    tp = config.source("tp")
    assert (tp.value, tp.key, tp.raw) == (4, "--tensor-model-parallel-size", "$TP")
    assert (tp.file, tp.line) == ("run.sh", 4)
    nodes = config.source("world.gpus_per_node")
    assert (nodes.value, nodes.line) == (8, 3)
    cp = config.source("cp")
    assert (cp.value, cp.line, str(cp)) == (1, 0, "default")
    assert str(config.source("dp")) == "follows from the other sizes"
    with pytest.raises(KeyError, match="no size 'xp'"):
        config.source("xp")


# A variable that the script does not set is read from the environment, as in the shell.
def test_variables_of_the_environment(monkeypatch):
    text = "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size ${TP:-2}"
    assert str(read_config(text).layouts["training"]) == "tp=2,cp=1,dp=4,pp=1"
    monkeypatch.setenv("TP", "8")
    assert str(read_config(text).layouts["training"]) == "tp=8,cp=1,dp=1,pp=1"


# A value of YAML, TOML or JSON has its line number.
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "seed: 1\nactor:\n  megatron:\n    tensor_model_parallel_size: 2\n", 4),
        ("a.toml", "[parallelism]\n# tensor_parallel_degree\ntensor_parallel_degree = 2\n", 3),
        ("a.json", '{"zero_optimization": {},\n\n"tensor_parallel": {\n"autotp_size": 2}}', 4),
    ],
)
def test_line_of_a_value(name, text, line, tmp_path):
    (tmp_path / name).write_text(text)
    source = read_config(tmp_path / name, 8).source("tp")
    assert (source.value, source.line, source.file) == (2, line, name)


# The files that `defaults` names are read first. Keys of the file itself override their keys.
def test_defaults_of_hydra(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "policy:\n  megatron_cfg:\n    tensor_model_parallel_size: 2\n"
        "    pipeline_model_parallel_size: 4\ncluster: {gpus_per_node: 8, num_nodes: 4}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "defaults: base.yaml\npolicy:\n  megatron_cfg:\n    tensor_model_parallel_size: 8\n"
    )
    config = read_config(tmp_path / "own.yaml")
    assert str(config.layouts["policy"]) == "tp=8,cp=1,dp=1,pp=4"
    assert (config.source("pp").file, config.source("tp").file) == ("base.yaml", "own.yaml")
    assert config.problems == ()
    (tmp_path / "base.yaml").unlink()
    assert "defaults base.yaml is not read" in read_config(tmp_path / "own.yaml", 8).problems[0]


# `plan` takes half a second on a quiet machine, process start included, and does not import torch.
# The limit is one second of CPU time, because other tests run.
def test_plan_does_not_import_torch(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size 2\n")
    program = (
        "import sys, resource; sys.modules['torch'] = None\n"
        "from hypercomm.cli import main\n"
        f"code = main(['plan', {str(file)!r}])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('seconds', used.ru_utime + used.ru_stime)\n"
        "sys.exit(code)"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "tp=2,cp=1,dp=4,pp=1: 8 ranks" in done.stdout
    assert float(done.stdout.split()[-1]) < 1


# The parser of shell is loaded only for a script.
def test_parser_is_loaded_for_scripts_only():
    program = (
        "import sys, hypercomm\n"
        "from hypercomm.cli import main\n"
        "main(['plan', 'tp=2,dp=4'])\n"
        "print([name for name in sys.modules if name.startswith('tree_sitter')])\n"
        "hypercomm.read_config('vllm serve m')\n"
        "print('tree_sitter' in sys.modules)"
    )
    done = run_python("-c", program)
    assert done.stdout.splitlines()[-2:] == ["[]", "True"], done.stderr


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


MEGATRON = "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size"
TITAN = "[parallelism]\ntensor_parallel_degree = 8\n\n[training]\nsteps = 1"
NEMO_RL = """
policy:
  megatron_cfg: {tensor_model_parallel_size: 2}
  generation:
    vllm_cfg: {tensor_parallel_size: 4}
    colocated: {enabled: false, resources: {gpus_per_node: 8, num_nodes: 2}}
cluster: {gpus_per_node: 8, num_nodes: 4}
"""
NEMO_RL_NODES = NEMO_RL.replace("gpus_per_node: 8, num_nodes: 2", "num_nodes: 3")
SFT = "torchrun --nproc-per-node 8 -m verl.trainer.sft_trainer"
FSDP = "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 8"
JOB = "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=8\nsrun --nodes=1 ray start\n"
SIZES = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"


# These cases were misread in launch files of other repositories.
@pytest.mark.parametrize(
    ("text", "framework", "layouts"),
    [
        (TITAN, "torchtitan", ["tp=8,cp=1,dp_shard=8,dp_replicate=1,pp=1"]),
        (f'TP=8\necho "use TP=2 or tp=4."\n{MEGATRON} $TP', "Megatron-LM", ["tp=8,cp=1,dp=1,pp=1"]),
        (NEMO_RL, "NeMo-RL", ["tp=2,cp=1,dp=8,pp=1", "tp=4,pp=1,dp=1,engines=4"]),
        (NEMO_RL_NODES, "NeMo-RL", ["tp=2,cp=1,dp=4,pp=1", "tp=4,pp=1,dp=1,engines=6"]),
        (f"{SFT} engine.ulysses_sequence_parallel_size=2", "verl", ["fsdp=8,ddp=1"]),
        (f"{SFT} engine.tensor_model_parallel_size=4", "verl", ["tp=4,cp=1,dp=2,pp=1"]),
        (FSDP, "accelerate", ["dp_shard=8"]),
        (f"# not vllm serve\n{MEGATRON} 2", "Megatron-LM", ["tp=2,cp=1,dp=4,pp=1"]),
        (f"{MEGATRON} 2 zero_optimization", "Megatron-LM", ["tp=2,cp=1,dp=4,pp=1"]),
        (f"{MEGATRON} 2 # Megatron-Bridge", "Megatron-LM", ["tp=2,cp=1,dp=4,pp=1"]),
        (f"cd Megatron-Bridge; {MEGATRON} 2", "Megatron-LM", ["tp=2,cp=1,dp=4,pp=1"]),
        ("vllm serve model", "vLLM", ["tp=1,pp=1,dp=1"]),
        (f"{JOB}srun train.py {SIZES}", "Megatron-LM", ["tp=8,cp=1,dp=1,pp=4"]),
    ],
)
def test_cases_that_were_misread(text, framework, layouts):
    config = read_config(text, world_size=64 if text is TITAN else None)
    found = [str(layout) for name, layout in config.layouts.items() if ":" not in name]
    assert (config.framework, found, config.problems) == (framework, layouts, ())


AREAL = """
cluster: {n_nodes: 10, n_gpus_per_node: 8}
rollout: {backend: "sglang:d4t8"}
actor: {backend: "megatron:(attn:d1p12t4|ffn:d1p12e4)"}
"""
NEOX = "pipe_parallel_size: 4\nmodel_parallel_size: 2\nzero_optimization: {stage: 1}"
SLIME = (
    "python3 train.py --train-backend fsdp --actor-num-nodes 1 --actor-num-gpus-per-node 8 "
    "--colocate --rollout-num-gpus-per-engine 2"
)
NANOTRON = (
    "parallelism: {dp: 2, tp: 2, pp: 1, tp_mode: ALL_REDUCE, context_parallel_size: 1, "
    "expert_parallel_size: 1}"
)
AUTOMODEL = "distributed: {strategy: fsdp2, pp_size: 8, dp_size: 16, ep_size: 16}\nx: megatron"
AXOLOTL = (
    "base_model: x\nfsdp: [full_shard]\ndp_shard_size: 2\ncontext_parallel_size: 2\n"
    "tensor_parallel_size: 2"
)
PRIMUS = (
    "modules: {pre_trainer: {framework: torchtitan, overrides: {parallelism: "
    "{data_parallel_shard_degree: 8}}}}"
)


# These files were taken for another framework's, or read by half, without a problem.
@pytest.mark.parametrize(
    ("text", "given", "framework", "world", "layouts"),
    [
        (
            AREAL,
            None,
            "AReaL",
            80,
            {
                "actor": "tp=4,cp=1,dp=1,pp=12",
                "actor:expert": "expt_tp=1,ep=4,expt_dp=1,pp=12",
                "rollout": "tp=8,pp=1,dp=1,engines=4",
            },
        ),
        (NEOX, 96, "GPT-NeoX", 96, {"training": "tp=2,dp=12,pp=4"}),
        (
            SLIME,
            None,
            "slime",
            8,
            {
                "training": "cp=1,dp_shard=8,dp_replicate=1",
                "rollout": "tp=2,pp=1,dp=1,engines=4",
            },
        ),
        (NANOTRON, None, "nanotron", 4, {"training": "tp=2,cp=1,dp=2,pp=1,ep=1"}),
        (
            AUTOMODEL,
            None,
            "NeMo Automodel",
            128,
            {
                "training": "tp=1,cp=1,dp_shard=16,dp_replicate=1,pp=8",
                "training:expert": "ep=16,ep_shard=1,pp=8",
            },
        ),
        (
            AXOLOTL,
            None,
            "axolotl",
            8,
            {"training": "tp=2,cp=2,dp_shard=2,dp_replicate=1,ep=1"},
        ),
    ],
)
def test_files_that_were_read_by_half(text, given, framework, world, layouts):
    config = read_config(text, given)
    assert (config.framework, config.world_size, config.problems) == (framework, world, ())
    assert {name: str(layout) for name, layout in config.layouts.items()} == layouts


SLIME_APART = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 "
    "--rollout-num-gpus-per-engine 2 --tensor-model-parallel-size 2 --context-parallel-size 2"
)
VERL_APART = (
    "python3 -m verl.experimental.x actor_rollout_ref.rollout.name=vllm trainer.nnodes=8 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8 "
    "rollout.nnodes=2 rollout.n_gpus_per_node=8"
)
AREAL_SHORT = "cluster: {n_nodes: 1, n_gpus_per_node: 8}\nallocation_mode: sglang:d4+d4"


# Ranks of engines that are not colocated are ranks of the job.
@pytest.mark.parametrize(
    ("text", "world", "layouts"),
    [
        (SLIME_APART, 8, ["tp=2,cp=2,dp=1,pp=1", "tp=2,pp=1,dp=1,engines=2"]),
        (VERL_APART, 80, ["fsdp=64,ddp=1", "tp=4,pp=1,dp=1,engines=4"]),
        (AREAL_SHORT, 8, ["tp=1,sp=1,dp=4", "tp=1,pp=1,dp=1,engines=4"]),
    ],
)
def test_engines_with_ranks_of_their_own(text, world, layouts):
    config = read_config(text)
    assert [str(views.base) for views in config.views.values()] == layouts
    assert (config.world_size, config.problems) == (world, ())


# Two modules that need more ranks than the cluster has are a problem.
def test_modules_that_need_more_ranks():
    config = read_config(AREAL_SHORT.replace("d4+d4", "d4+d8"))
    assert config.problems == ("the modules need 12 ranks; there are 8",)


# An engine of ms-swift has as many ranks as its sizes need, not those of a training.
def test_engine_of_swift():
    config = read_config("swift rollout --model m --vllm_tensor_parallel_size 2")
    assert (config.world_size, config.problems) == (2, ())


# A sourced file receives the arguments after its name.
def test_arguments_of_a_sourced_file(tmp_path):
    (tmp_path / "args.sh").write_text("if [ $1 != small ]; then TP=8; else TP=2; fi\n")
    (tmp_path / "run.sh").write_text(f"source ./args.sh small\n{MEGATRON} $TP\n")
    assert read_config(tmp_path / "run.sh").source("tp").value == 2


def test_primus_has_one_module():
    assert list(read_config(PRIMUS).views) == ["training"]


# Containers of a manifest are read one by one. The image may tell the framework.
def test_manifests(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "a:\n  image: lmsysorg/sglang\n  command: python3 -m sglang.launch_server --tp 8\n"
        "b:\n  image: vllm/vllm-openai\n  command: --model m --tensor-parallel-size 2\n"
        'c:\n  command: ["sh", "-c"]\n  args: ["vllm serve m -tp 4"]\n'
    )
    config = read_config(file)
    assert config.framework == "SGLang and vLLM"
    sizes = {name: views.base.size_of("tp") for name, views in config.views.items()}
    assert sizes == {"inference@3": 8, "inference@6": 2, "inference@8": 4}
    assert config.problems == ()


# Texts that only mention an inference engine belong to no framework.
@pytest.mark.parametrize("text", ["engine: vllm\ntp: 2", "x: 1  # sglang, tp=2", "a: sglang.d4t2"])
def test_mention_of_an_engine_is_no_launch_file(text):
    with pytest.raises(LayoutError, match="unknown framework"):
        read_config(text)


# torchtitan's sizes determine the world size if the number of shards is given.
def test_world_of_given_shards():
    text = "[parallelism]\ndata_parallel_shard_degree = 8\ntensor_parallel_degree = 2"
    assert read_config(text).layouts["training"].size == 16


# A file in `defaults` may contain what tells the framework.
def test_framework_of_a_base_file(tmp_path):
    (tmp_path / "base.yaml").write_text(NEMO_RL)
    (tmp_path / "own.yaml").write_text("defaults: base.yaml\ncluster: {num_nodes: 8}\n")
    config = read_config(tmp_path / "own.yaml")
    assert (config.framework, config.world_size) == ("NeMo-RL", 64)


# A value that is not known is reported once, and causes no other problem.
def test_unknown_values():
    text = f"TP=${{10}}\n{MEGATRON} $TP --sequence-parallel"
    assert [one.partition(" is ")[2] for one in read_config(text).problems] == [
        "argument 10 of the script, which is not known; give it, as in --set 10=8"
    ]
    text = f'TP=4\ncase "$1" in --tp) TP="$2"; shift;; esac\n{MEGATRON} $TP'
    assert str(read_config(text).layouts["training"]) == "tp=4,cp=1,dp=2,pp=1"
    assert read_config(f"CMD='{MEGATRON} 2'\neval $CMD").problems == ()
    unread = read_config(f"eval $(cat x)\n{MEGATRON} 2 $MORE").problems[0]
    assert "eval $(...) is not read, and may set $MORE" in unread
    text = "image: vllm/vllm-openai\nargs: [--tensor-parallel-size, $(GROUP_SIZE)]"
    assert "needs GROUP_SIZE, which is not set" in read_config(text).problems[0]


# A line of TOML is the line of the key in its own table.
def test_lines_of_toml():
    text = "[deployment]\nnum_train_gpus = 4\n[x]\ncp = 8\n[trainer.model]\n# cp = 1\ncp = 2\n"
    assert read_config(text).source("cp").line == 7

"""Test that each problem of a launch file names the file, the line and a value that would work."""

import contextlib
import importlib.util
import os
import re
import time
from pathlib import Path

import pytest
from time_limits import scaled_s

from hypercomm import read_config
from hypercomm.compat.launch_options import module_and_size, similar_size
from hypercomm.errors import HyperCommError, LayoutError
from hypercomm.tools.launch_files.reading import read_settings

RUN = "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size"


@contextlib.contextmanager
def within(quiet_s):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < scaled_s(quiet_s)


# A file that is not a launch file raises with the reason.
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", b"\x7fELF\x02\x01\x01\x00\x00--tp 8", "binary"),
        ("a.sh", b"\xff\xfe--tensor-model-parallel-size 8", "cannot be read as text"),
        ("a.sh", b"--tensor-model-parallel-size 8\n" + b" " * 2**18, "262,144 bytes"),
        ("a.yaml", b"a: [1, 2\ntensor_model_parallel_size: 8", "a.yaml is not valid yaml"),
        ("a.yaml", b"a: &a [*a]\ntensor_model_parallel_size: 8", "a.yaml is not valid yaml"),
        ("a.json", b'{"zero_optimization": ', "a.json is not valid json"),
        ("a.toml", b"[parallelism]\ntensor_parallel_degree = \n", "a.toml is not valid toml"),
        (
            "a.toml",
            b"[parallelism]\na_parallel_degree = 1\na_parallel_degree = 2",
            "not valid toml",
        ),
        ("a.sh", b"python train.py --lr 3", "unknown framework: it has no flag, key or command of"),
        ("a.sh", b"", "unknown framework"),
    ],
)
def test_files_that_are_not_launch_files(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LayoutError, match=message):
        read_config(tmp_path / name)


def test_missing_files_raise(tmp_path):
    with pytest.raises(LayoutError, match="is a folder; give the path of a launch file, or sizes"):
        read_config(tmp_path)
    for path in (tmp_path / "nope.sh", str(tmp_path / "nope.yaml"), "nope.sh"):
        with pytest.raises(LayoutError, match="cannot be read"):
            read_config(path)
    for wrong in (None, 8, ["a.sh"]):
        with pytest.raises(LayoutError, match="expected a path or a text"):
            read_config(wrong)
    with pytest.raises(LayoutError, match="world_size"):
        read_config(f"{RUN} 2", world_size=0)


# A sparse file of 50 MB is not read to its end.
def test_large_files_are_not_read(tmp_path):
    file = tmp_path / "large.yaml"
    file.touch()
    os.truncate(file, 50 * 2**20)
    with within(1), pytest.raises(LayoutError, match="more than 262,144 bytes"):
        read_config(file)


# YAML aliases that expand to billions of values raise fast.
def test_yaml_bomb_raises():
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with within(3), pytest.raises(LayoutError, match="more than 20,000 values"):
        read_config("\n".join([*lines, "tensor_model_parallel_size: 8"]))


# YAML anchors, merges and tags are resolved.
def test_yaml_anchors_and_tags():
    text = """
base: &base
  tensor_model_parallel_size: 4
actor:
  megatron:
    <<: *base
    pipeline_model_parallel_size: !!int 2
  path: !custom {a: b}
"""
    config = read_config(text, 8)
    assert str(config.layouts["actor"]) == "tp=4,cp=1,dp=1,pp=2"


# Text that could take a parser very long is read fast.
@pytest.mark.parametrize(
    "hostile",
    [
        "$(",
        "${",
        "(",
        "'a",
        '"a',
        "`",
        "\\",
        "$((1*",
        "A=",
        "--a ",
        "${a:-",
        "x='$(' ",
        "[a]\n",
        "A=$A$A;",
    ],
)
def test_hostile_text_is_read_fast(hostile):
    with within(6):
        read_settings(hostile * (20_000 // len(hostile)), "a.sh", {})


# A value is a problem if it contains an unset variable or a command, or if it is not a number. The
# command is not run.
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{RUN} $TPX",
            "line 1 --tensor-model-parallel-size $TPX needs TPX, which is not set; set it",
        ),
        (f"{RUN} ${{TPX}}", "needs TPX, which is not set; set it, as in TPX=8 hypercomm plan"),
        (
            f"TPX=$1\n{RUN} $TPX",
            "line 2 --tensor-model-parallel-size $TPX is argument 1 of the script",
        ),
        (f"TPX=$(nvidia-smi | wc -l)\n{RUN} $TPX", "is computed by a command, which is not run"),
        (f"TPX=`nproc`\n{RUN} $TPX", "is computed by a command"),
        (f"{RUN} eight", "--tensor-model-parallel-size eight is not a number: 'eight'"),
        (f"{RUN} 2.5", "is not a number: '2.5'"),
        (f"{RUN} -2", "tp must be at least 1, got -2"),
        (f"{RUN} 0", "tp must be at least 1, got 0"),
        (f"{RUN} $((8/0))", "is computed by a command"),
        (
            "torchrun --nnodes $NX --nproc-per-node 8 t.py --tensor-model-parallel-size 2",
            "needs NX",
        ),
    ],
)
def test_values_that_cannot_be_read(text, problem):
    config = read_config(text)
    assert config.views == {}
    assert any(problem in one for one in config.problems), config.problems
    with pytest.raises(LayoutError, match="no layout was found for module 'training'"):
        config.grids()


# If a size has two values, the later one counts, and the problem names both lines.
def test_two_values_of_one_size(tmp_path):
    (tmp_path / "run.sh").write_text(
        f"TP=2\nif [ $BIG ]; then\n  A=(--tensor-model-parallel-size 4)\nfi\n{RUN} $TP ${{A[@]}}\n"
    )
    config = read_config(tmp_path / "run.sh")
    assert str(config.layouts["training"]) == "tp=2,cp=1,dp=4,pp=1"
    (problem,) = config.problems
    assert problem == (
        "run.sh:5 --tensor-model-parallel-size $TP replaces another value of tp (4 in line 3)"
    )
    twice = read_config("tensor_model_parallel_size: 2\ntensor_model_parallel_size: 4", 8)
    assert "replaces another value of tp (2 in line 1)" in twice.problems[0]


# If sizes do not divide the world, the problem names sizes and numbers of ranks that would work.
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{RUN} 3",
            "tp=3,pp=1,cp=1,dp=-1 needs a multiple of 3 ranks, for example 6 or 9; the world has 8",
        ),
        (f"{RUN} 3", "; tp=2 would fit"),
        (f"{RUN} 2 --context-parallel-size 3", "; cp=2 would fit"),
        # without a size for the experts' tp, it equals tp, so eight times as many ranks are needed
        (
            f"{RUN} 8 --expert-model-parallel-size 8",
            "expt_tp=8,ep=8,pp=1,dp=-1 needs a multiple of 64",
        ),
        (f"{RUN} 8 --expert-model-parallel-size 8", "is taken from tp=8"),
        (f"{RUN} 8 --expert-model-parallel-size 8", "tp=1 or ep=1 or expt_tp=1 would fit"),
        (f"{RUN} 8 --expert-model-parallel-size 8", "; expt_tp=8 taken from tp; "),
        (
            "torchrun --nproc-per-node 8 -m torchtitan.x --parallelism.expert_parallel_degree 3",
            "cp * tp = 8 (tp=1,cp=1,dp_shard=8,dp_replicate=1,pp=1); dp_shard=8 is inferred",
        ),
        ("num_processes: 8\nparallelism_config:\n  tp_size: 3\n", "needs 3 ranks; the world has 8"),
        ("sglang serve m --tp 16 --dp 3 --enable-dp-attention", "attn_tp=-1,attn_dp=3"),
    ],
)
def test_sizes_that_do_not_fit(text, problem):
    config = read_config(text)
    assert config.views == {}
    assert any(problem in one for one in config.problems), config.problems


# If the number of ranks is unknown, the problem says how to specify it. The number must fit the
# sizes.
def test_number_of_ranks():
    text = "train.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 3"
    config = read_config(text)
    assert config.world_size is None
    assert "--world-size (world_size=), a multiple of 12" in config.problems[0]
    assert str(read_config(text, 24).layouts["training"]) == "tp=4,cp=1,dp=2,pp=3"
    assert "needs a multiple of 12 ranks" in read_config(text, 16).problems[0]
    huge = (
        "torchrun --nnodes 999999999 --nproc-per-node 999999999 t.py --tensor-model-parallel-size 2"
    )
    with pytest.raises(HyperCommError, match="the number of ranks"):
        read_config(huge)


# Options that a framework ignores or rejects are problems.
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{RUN} 1 --sequence-parallel", "sequence_parallel is ignored, because tp=1"),
        (f"{RUN} 2 --data-parallel-size 4", "Megatron has no option for dp=4"),
        ("[parallelism]\nexpert_tensor_parallel_degree = 2", "torchtitan 0.3 has no"),
        (
            '{"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}',
            "zero_hpz_partition_size=8 is ignored, because it needs ZeRO stage 3",
        ),
        (
            "vllm serve m -tp 2 -pp 2 --enable-expert-parallel",
            "the layout of the experts is not shown",
        ),
        ("vllm serve m -tp 2 -cp 2", "vllm layouts do not have cp=2; cp=1 would fit"),
    ],
)
def test_ignored_options(text, problem):
    (found,) = read_config(text, 16).problems
    assert problem in found


# A misspelt size counts as not given, so it is a problem that names the right key.
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{RUN} 2 --context-paralell-size 2",
            (
                "line 1 --context-paralell-size 2 is an unknown option; did you mean "
                "--context-parallel-size?"
            ),
        ),
        (
            f"{RUN} 2 --pipeline_model_parallel_siez=2",
            "did you mean --pipeline_model_parallel_size?",
        ),
        (
            f"slime --rollout-num-gpus 8 {RUN} 2 --sglang-tensor-parallel-sze 2",
            "did you mean --sglang-tensor-parallel-size?",
        ),
        ("vllm serve m --tensor-parralel-size 2", "did you mean --tensor-parallel-size?"),
        ("vllm serve m --enable-expert-paralel", "did you mean --enable-expert-parallel?"),
        (
            "[parallelism]\ntensor_parallel_degree = 1\nexpert_paralel_degree = 2",
            (
                "line 3 expert_paralel_degree 2 is an unknown option; did you mean "
                "expert_parallel_degree?"
            ),
        ),
        (
            "a.x=1 actor_rollout_ref.actor.megatron.tensor_model_paralel_size=2",
            "did you mean actor_rollout_ref.actor.megatron.tensor_model_parallel_size?",
        ),
    ],
)
def test_misspelt_sizes(text, problem):
    found = read_config(text, 8).problems
    assert any(problem in one for one in found), found


# If the misspelt size is all that shows the framework, the error has the right key, too.
def test_misspelt_size_of_an_unknown_framework():
    with pytest.raises(LayoutError, match=r"unknown framework.*did you mean --tensor-model-parall"):
        read_config("torchrun train.py --tensor-model-paralel-size 2")


def megatron_options():
    """Return the options of megatron-core: the fields of its dataclasses, and flags of scripts."""
    found = set()
    for folder in importlib.util.find_spec("megatron").submodule_search_locations:
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            pairs = re.findall(r"""^    (\w+): |["']--([\w-]+)["']""", text, re.MULTILINE)
            found |= {(field or flag).replace("-", "_") for field, flag in pairs}
    return found


ENGINE_OPTIONS = {
    "attention_context_parallel_size",
    "data_parallel_rank",
    "data_parallel_size_local",
    "decode_context_parallel_size",
    "disable_expert_parallel",
    "enable_dp_lm_head",
    "moe_data_parallel_size",
    "moe_dense_tp_size",
    "no_enable_expert_parallel",
    "prefill_context_parallel_size",
}
"""The options of vLLM and SGLang with the names that are closest to those of sizes.

From `ParallelConfig` of vLLM, and from `ServerArgs` of SGLang.
"""


# No real option is taken for a misspelt size.
def test_real_options_are_not_misspelt_sizes():
    options = megatron_options()
    assert {"tensor_model_parallel_size", "virtual_pipeline_model_parallel_size"} <= options
    others = {one for one in options | ENGINE_OPTIONS if not module_and_size((one,))[1]}
    assert [one for one in others if similar_size((one,))] == []

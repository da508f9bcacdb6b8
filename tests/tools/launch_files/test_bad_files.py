"""Test that each problem of a launch file names the file, the line and a value that would work."""

import contextlib
import importlib.util
import os
import re
import time
from pathlib import Path

import pytest

from hypercomm import read_config
from hypercomm.errors import HyperCommError, LayoutError
from hypercomm.tools.launch_files.shell import Place, Script
from hypercomm.tools.launch_files.tables import frameworks, similar

RUN = "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size"
CP = "--context-parallel-size=4"


@contextlib.contextmanager
def within(processor_s):
    begin = time.process_time()
    yield
    assert time.process_time() - begin < processor_s


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
        ("a.sh", b"python train.py --lr 3", "unknown framework: it starts no program and has"),
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
    assert str(config.layouts["training"]) == "tp=4,cp=1,dp=1,pp=2"


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
    with within(6), contextlib.suppress(HyperCommError):
        Script({}, {}).follow(hostile * (20_000 // len(hostile)), Place("a.sh", 1))


# A value is a problem if it contains an unset variable or a command, or if it is not a number. The
# command is not run.
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{RUN} $TPX",
            "line 1 --tensor-model-parallel-size $TPX needs TPX, which is not set; set it",
        ),
        (f"{RUN} ${{TPX}}", "needs TPX, which is not set; set it, as in --set TPX=8"),
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


# If a size has two values in one command, the later one counts, and the problem names both lines.
def test_two_values_of_one_size():
    config = read_config(f"A=(--tensor-model-parallel-size 4)\n{RUN} 2 ${{A[@]}}\n")
    assert str(config.layouts["training"]) == "tp=4,cp=1,dp=2,pp=1"
    assert config.problems == (
        "line 1 --tensor-model-parallel-size 4 replaces another value of tp (2 in line 2)",
    )
    twice = read_config("tensor_model_parallel_size: 2\ntensor_model_parallel_size: 4", 8)
    assert "replaces another value of tp (2 in line 1)" in twice.problems[0]


IF = "if [ $BIG = 1 ]; then\n  {}\nelse\n  {}\nfi\n"
CASE = "case $1 in\n  small) {};;\n  large) {};;\n  *) exit 1;;\nesac\n"
NODES = "torchrun --nnodes $N --nproc-per-node 8 t.py --tensor-model-parallel-size 2"


# Values that differ between branches are a problem that names both values and their lines. With
# the variable that decides, there is one plan for each branch.
@pytest.mark.parametrize(
    ("text", "lines", "name", "choices"),
    [
        (CASE.format("TP=2", "TP=8") + f"{RUN} $TP", (2, 3), "1", {"small": 2, "large": 8}),
        (IF.format("TP=2", "TP=8") + f"{RUN} $TP", (2, 4), "BIG", {"1": 2, "0": 8}),
        (
            f'X=1\n[ "$BIG" = 1 ] && TP=1\n{RUN} ${{TP:-2}}',
            (2, 3),
            "BIG",
            {"1": 1, "0": 2},
        ),
        (
            f"TP=8\nif [ $N -lt 4 ]; then\nTP=2\nfi\n{RUN} $TP",
            (3, 1),
            "N",
            {"2": 2, "16": 8},
        ),
        (
            "f() {\n" + IF.format("TP=2", "TP=8") + "}\nf\n" + f"{RUN} $TP",
            (3, 5),
            "BIG",
            {"1": 2, "0": 8},
        ),
    ],
)
def test_branches(text, lines, name, choices):
    config = read_config(text)
    assert config.views == {}
    (problem,) = config.problems
    values = list(choices.values())
    for value, line in zip(values, lines, strict=True):
        assert re.search(rf"\b{value} in line {line}\b", problem), problem
    assert f"--set {name}=" in problem
    for choice, size in choices.items():
        decided = read_config(text, variables={name: choice})
        assert decided.layouts["training"].size_of("tp") == size
        assert decided.problems == ()
    assert read_config(text, variables={"TP": "4"}).layouts["training"].size_of("tp") == 4


# A value that may have changed, or that combines alternatives of two variables, is not used.
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "if [ $X ]; then T=2; else T=4; fi; if [ $Y ]; then C=4; else C=2; fi; T=$((T*C))",
            "needs",
        ),
        ("case $X in a) T=2 P=4;; b) T=4 P=4;; *) T=4 P=2;; esac; T=$((T*P))", "needs"),
        (
            "if [ $X ]; then A=1 B=2; else A=2 B=1; fi; if [ $A = $B ]; then T=2; else T=4; fi",
            "differs",
        ),
        ("T=2; read -r T < file", "needs T"),
        ("T=2; while read -r T; do :; done < file", "needs T"),
        ("T=2; mapfile -t T < file", "needs T"),
        ("T=2; ((T*=2))", "needs T"),
        ("T=2; let T=T*2", "needs T"),
        ("T=(2 4); T[0]=8", "needs T"),
    ],
)
def test_values_that_are_not_known(text, shown):
    config = read_config(f"{text}\n{RUN} $T")
    assert config.views == {}
    assert any(shown in problem for problem in config.problems), config.problems


# Lists, subshells and `shift COUNT` are followed.
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("N=1; Q=2; [ $N = 1 ] && [ $Q = 2 ] && T=2", 2),
        ("N=1; [ $N = 1 ] && T=2 || T=4", 2),
        ("T=2; (T=4)", 2),
        ("f() { shift 2; T=$1; }; f 2 4 8", 8),
    ],
)
def test_values_that_are_known(text, size):
    config = read_config(f"{text}\n{RUN} $T")
    assert config.layouts["training"].size_of("tp") == size
    assert config.problems == ()


# Of branches that start a program and end the script, only the one that is given is shown.
def test_branches_that_end_the_script():
    text = f"case $1 in a) {RUN} 2; exit;; b) {RUN} 4; exit;; esac\n{RUN} 8"
    for argument, size in (("a", 2), ("b", 4), ("c", 8)):
        config = read_config(text, variables={"1": argument})
        assert [views.base.size_of("tp") for views in config.views.values()] == [size]
    assert len(read_config(text).views) == 3


def test_branches_of_node_counts():
    text = CASE.format("N=1", "N=4") + NODES
    (problem,) = read_config(text).problems
    assert "1 in line 2 or 4 in line 3" in problem
    assert read_config(text, variables={"1": "large"}).world_size == 32


# Flags that only one branch adds are a problem, too. A branch that only prints or ends the script
# is none.
def test_branches_that_add_flags():
    flag = "--expert-model-parallel-size=4"
    text = f'[ -n "$EP" ] || A=1\nif [ $MOE = 1 ]; then A={flag}; fi\n{RUN} 1 $A'
    assert "4 in line 2 or not given" in read_config(text).problems[0]
    checks = f"if [ $# -lt 1 ]; then echo usage; exit 1; fi\n[[ -d x ]] || exit 1\n{RUN} 2"
    assert read_config(checks).problems == ()


# Two commands in one script are both shown.
def test_two_commands():
    config = read_config(f"{RUN} 2\n{RUN} 4\nfor t in 1 8; do {RUN} $t; done\n")
    sizes = {name: views.base.size_of("tp") for name, views in config.views.items()}
    assert sizes == {"training@1": 2, "training@2": 4, "training@3": 1, "training@3#2": 8}
    both = read_config(f"vllm serve m -tp 4\n{RUN} 2")
    assert both.framework == "vLLM and Megatron-LM"
    assert list(both.views) == ["inference@1", "training@2"]


# Of arrays, functions, defaults, arithmetic and here-documents, the values of the shell are read.
@pytest.mark.parametrize(
    "text",
    [
        f"A=(--x 1)\nA+=(--context-parallel-size $((2 * 2)))\n{RUN} 2 ${{A[@]}}",
        f'A="--x 1"\nA="$A --context-parallel-size ${{CPX:-4}}"\n{RUN} 2 $A',
        f"f() {{ {RUN} $1 $2 $3; }}\nf 2 --context-parallel-size 4",
        f"bash -c '{RUN} 2 \\\n --context-parallel-size=4'",
        f"cat > a.sh <<EOF\n{RUN} 2 --context-parallel-size 4\nEOF\nsbatch a.sh",
        f"CMD='{RUN} 2'\neval $CMD --context-parallel-size 4",
        f"IFS=, read -r T C <<< 2,4\n{RUN} $T --context-parallel-size $C",
        f"read -r -d '' A <<EOF\n--context-parallel-size 4\nEOF\n{RUN} 2 $A",
        # arguments of functions and of the script, and branches that end the script
        f"read -ra A <<< '--x 1 --context-parallel-size 4'\n{RUN} 2 ${{A[@]}}",
        f'f() {{ T=$1; shift; {RUN} $T "$@"; }}\nf 2 --context-parallel-size 4',
        f"f() {{ if [ $# = 1 ]; then T=8; else T=$1; fi; {RUN} $T $2; }}\nf 2 {CP}",
        f"[ -z $H ] && exit 1\nif [ -z $H ]; then exit 1; fi\n{RUN} 2 {CP}",
        f"f() {{ exit 1; }}\nif [ -z $1 ]; then f; fi\n[ -d x ] || f\n{RUN} 2 {CP}",
        f"f() {{ if [ $1 = a ]; then T=2; return; fi; T=8; }}\nf a\n{RUN} $T {CP}",
    ],
)
def test_shell(text):
    config = read_config(text)
    assert str(config.layouts["training"]) == "tp=2,cp=4,dp=1,pp=1"
    assert config.problems == ()


# Alternatives of a text that `eval` or `bash -c` runs differ, as those of a command do.
@pytest.mark.parametrize("run", ["eval $CMD", 'bash -c "$CMD"'])
def test_alternatives_of_a_text(run):
    text = IF.format("TP=2", "TP=8") + f'CMD="{RUN} $TP"\n{run}'
    (problem,) = read_config(text).problems
    assert "2 in line" in problem
    assert "or 8 in line" in problem


# The value of an expression that is not evaluated can be given.
@pytest.mark.parametrize("value", ["${M[$k]}", "${M%b}", "${M,,}"])
def test_values_of_expressions_are_given(value):
    text = f"M=(1 2)\n{RUN} {value}"
    assert "needs M, which is not set; set it, as in --set M=8" in read_config(text).problems[0]
    assert read_config(text, variables={"M": "2"}).source("tp").value == 2


# What is not followed is a problem if it may set a variable of the command.
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('read -ra A <<< "$(python args.py)"', "line 1 read A is not read, and may set ${A[@]}"),
        ("mapfile -t A < args.txt", "line 1 mapfile -t is not read, and may set ${A[@]}"),
        ("X=<size>", "line 1 is not valid shell; the rest may be misread"),
        ("--sequence-parallel", "line 1 --sequence-parallel does not belong to a command"),
        ("read TP", "needs TP, which is not set"),
    ],
)
def test_lines_that_are_not_followed(line, problem):
    problems = read_config(f"{line}\n{RUN} ${{TP:-2}} ${{A[@]}}\n{RUN} $TP").problems
    assert any(problem in one for one in problems), problems


# Scripts that would take long to follow are read fast, or are an error.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{'if [ $A = 1 ]; then B=1; fi;' * 2_000}{RUN} 2", ""),
        (f"{'if [ $A = 1 ]; then ' * 300}B=1{'; fi' * 300}\n{RUN} 2", "text is nested too deeply"),
        (f"f() {{ f; f; }}\nf\n{RUN} 2", ""),
        (f"{'for a in 1 2 3 4 5 6 7 8; do ' * 6}{RUN} $a{'; done' * 6}", "too long to follow"),
    ],
    ids=["conditions", "nesting", "calls", "loops"],
)
def test_scripts_that_would_take_long(text, message):
    with within(4):
        if message:
            with pytest.raises(LayoutError, match=message):
                read_config(text)
        else:
            assert read_config(text).source("tp").value == 2


# A script with an error is read up to it, or not at all. The error is a problem.
@pytest.mark.parametrize(
    "line",
    [
        "if [ $A = 1 ]; then",
        "if [[ a == ]]; then TP=2; fi",
        "case $1 in a) TP=4",
        "for in; do",
        "f() {",
        "TP=$((2 * ))",
        'TP="${A:-$(',
        "read A <<<",
        "cat <<EOF",
        "((",
    ],
)
def test_broken_scripts(line):
    try:
        problems = read_config(f"{RUN} 2\n{line}\n").problems
    except LayoutError as error:
        problems = (str(error),)
    assert any("is not valid shell" in one or "unknown framework" in one for one in problems)


# Conditions that are not evaluated are unknown.
@pytest.mark.parametrize("test", ["(( 4 > 2 ))", "[[ a = a && b = b ]]", "[ -f x ]", "grep x y"])
def test_conditions_that_are_not_evaluated(test):
    text = f"TP=8\nif {test}; then TP=2; fi\n{RUN} $TP"
    assert "2 in line 2 or 8 in line 1" in read_config(text).problems[0]


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
        (f"{RUN} 8 --expert-model-parallel-size 8", "expt_tp=1 or ep=1 would fit"),
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
    assert "the number of ranks is not given; give it as --world-size (world_size=)" in config.problems[0]
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
        ("vllm serve m -tp 2 -cp 2", "vllm layouts do not have cp=2"),
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
            "run a.x=1 actor_rollout_ref.actor.megatron.tensor_model_paralel_size=2",
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
    keys = [key for one in frameworks() for key in one.known_keys()]
    others = (options | ENGINE_OPTIONS) - {key.rpartition(".")[2] for key in keys}
    assert [one for one in others if similar(one, keys)] == []


# ---- files that a file names --------------------------------------------------------------------

NEMO = "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}}\n"


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "secret.yaml").write_text("password: hunter2\n: {\n")
    (tmp_path / "base.yaml").write_text(f"{NEMO}cluster: {{num_nodes: 1, gpus_per_node: 8}}\n")
    return folder


# Files outside the folder of the file are not read, unless the user includes them.
@pytest.mark.parametrize("name", ["../secret.yaml", "/etc/passwd", "../base.yaml", "link.yaml"])
def test_files_outside_the_folder(name, job):
    (job / "link.yaml").symlink_to(job.parent / "base.yaml")
    (job / "a.yaml").write_text(f"defaults: {name}\n{NEMO}")
    config = read_config(job / "a.yaml", 8)
    assert any(
        "is outside the folder of the file; pass it, as in --include" in one
        for one in config.problems
    )
    assert "hunter2" not in str(config)
    assert "root:" not in str(config)
    if "secret" not in name and "etc" not in name:
        included = read_config(job / "a.yaml", include=[job.parent])
        assert (included.world_size, included.problems) == (8, ())


# A file that names itself, directly or in a circle, is a problem. Each file is read once.
@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["b", "c", "a"]])
def test_circles_of_files(names, job):
    for here, there in zip(["a", *names], names, strict=False):
        (job / f"{here}.yaml").write_text(f"defaults: {there}.yaml\n{NEMO}")
    config = read_config(job / "a.yaml", 8)
    assert any("leads back to this file" in one for one in config.problems)


def test_files_that_are_named_often(job):
    many = ", ".join(["b.yaml"] * 40)
    (job / "a.yaml").write_text(f"defaults: [{many}]\n{NEMO}")
    (job / "b.yaml").write_text(f"defaults: [{', '.join(['c.yaml'] * 40)}]\nx: 1\n")
    (job / "c.yaml").write_text("y: 1\n")
    with within(2):
        assert read_config(job / "a.yaml", 8).problems == ()
    for at in range(80):
        (job / f"n{at}.yaml").write_text(f"defaults: n{at + 1}.yaml\nx: 1\n")
    (job / "a.yaml").write_text(f"defaults: n0.yaml\n{NEMO}")
    with pytest.raises(LayoutError, match="one of more than 64 files"):
        read_config(job / "a.yaml", 8)


# A script that sources a file outside its folder names the arguments that the file may set.
def test_sourced_files(job):
    (job.parent / "args.sh").write_text("ARGS=(--tensor-model-parallel-size 2)\n")
    (job / "run.sh").write_text(
        f'source "$(dirname $0)/../args.sh"\n{RUN.rpartition(" ")[0]} ${{ARGS[@]}}\n'
    )
    with pytest.raises(LayoutError, match="unknown framework"):
        read_config(job / "run.sh")
    (job / "run.sh").write_text(f"source ../args.sh\n{RUN} 2 ${{MORE[@]}}\n")
    assert "args.sh is not read, and may set ${MORE[@]}" in read_config(job / "run.sh").problems[0]
    (job / "own.sh").write_text("TP=4\n")
    (job / "run.sh").write_text(f'source "$(dirname $0)/own.sh"\n{RUN} $TP\n')
    assert read_config(job / "run.sh").source("tp").value == 4
    (job / "run.sh").write_text(f"source /elsewhere/own.sh\n{RUN} $TP\n")
    assert "own.sh is not read, and may set $TP" in read_config(job / "run.sh").problems[0]


# A file with many tables is read fast. One with more values than the limit is a problem.
def test_thousands_of_tables():
    text = "".join(f"[t{at}]\n" for at in range(16_000))
    with within(5):
        config = read_config(f"[parallelism]\ntensor_parallel_degree = 2\n{text}", 8)
    assert config.problems == ()
    with within(5), pytest.raises(LayoutError, match="more than 20,000 values"):
        read_config("".join(f"[{at}]\n" for at in range(21_000)))


# Characters that a terminal interprets are replaced, wherever a file has them.
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", f"{RUN} \x1b[31m8"),
        ("a.sh", f"X=$'\x1b[2J'\n{RUN} $X"),
        ("a.yaml", 'tensor_model_parallel_size: "\\e]0;x\\a"'),
        ("a.yaml", 'tensor_model_parallel_size: 2\n"\\e[1mtensor_parallel_size": 4'),
        ("a.toml", '[parallelism]\ntensor_parallel_degree = "\\u001b[1m"'),
        ("a.yaml", "defaults: \x9b1m.yaml\ntensor_model_parallel_size: 2"),
        ("a\x1b[1m.sh", f"{RUN} 8 --tensor-model-paralel-size 3"),
        ("\x1b[1m.sh", "python train.py"),
    ],
)
def test_terminal_escapes(name, text, tmp_path, in_process):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    done = in_process("plan", str(file), "--world-size", "8")
    shown = done.stdout + done.stderr
    assert shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown), shown


# ---- frameworks ---------------------------------------------------------------------------------


# A file without a size, an unknown key that looks like a size, and numbers of ranks that contradict
# each other are problems.
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("python -m verl.trainer.main_eval x=1", "no size of verl was found; give the file that"),
        ("parallelism: {tp_mode: REDUCE}\nmodel: {x: 1}", "no size of nanotron was found"),
        (
            "pipe_parallel_size: 2\nexpert_parallel_size: 4",
            "expert_parallel_size 4 looks like a size",
        ),
        (
            "actor: {backend: 'fsdp:d4'}\ncluster: {n_nodes: 1}\nrollout: {tp_size: 4}",
            "tp_size 4 looks",
        ),
        (
            f"#!/bin/bash\n#SBATCH --nodes=4 --gres=gpu:8\n{RUN} 2 --nnodes 2",
            "line 3 --nnodes 2 contradicts line 2 --nodes 4; give --world-size",
        ),
        (
            f"{RUN} 2 --num_processes 16 --num_machines 1",
            "contradicts 8 ranks = 1 nodes of 8",
        ),
        (
            "actor: {backend: 'fsdp:d16'}\ncluster: {n_nodes: 1, n_gpus_per_node: 8}",
            "actor: its sizes need 16 ranks; there are 8",
        ),
        (
            '{"zero_optimization": {"stage": 3}}',
            "the number of ranks is not given",
        ),
    ],
)
def test_never_half(text, problem):
    problems = read_config(text).problems
    assert any(problem in one for one in problems), problems


def test_plain_zero_has_all_ranks():
    config = read_config('{"zero_optimization": {"stage": 3}}', 8)
    assert str(config.source("dp")) == "all ranks"


# A word is no evidence for a framework.
@pytest.mark.parametrize(
    "text",
    [
        "# megatron\npython train.py",
        "echo torchrun pretrain_gpt.py --tensor-model-parallel-size 2",
        "pip install megatron-core vllm sglang",
        "context_parallel_size: 2",
        "git clone https://x/Megatron-LM && cd Megatron-LM",
        "deepspeed: true",
    ],
)
def test_words_are_no_evidence(text):
    with pytest.raises(LayoutError, match="unknown framework"):
        read_config(text)

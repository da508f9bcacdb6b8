"""Test files that are not launch files, files that would take long, and files that others name."""

import contextlib
import importlib.util
import os
import re
import time
from pathlib import Path

import pytest
from launch_inputs import TORCHRUN

from hypercomm import read_config
from hypercomm.errors import HyperCommError, LayoutError
from hypercomm.tools.launch_files.shell import Place, Script
from hypercomm.tools.launch_files.tables import frameworks, similar


@contextlib.contextmanager
def within(processor_s):
    begin = time.process_time()
    yield
    assert time.process_time() - begin < processor_s


# A file that is not a text raises with the reason.
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\x02\x01\x01\x00\x00--tp 8", "binary"),
        (b"\xff\xfe--tensor-model-parallel-size 8", "cannot be read as text"),
        (b"--tensor-model-parallel-size 8\n" + b" " * 2**18, "262,144 bytes"),
    ],
)
def test_files_that_are_not_text(content, message, tmp_path):
    (tmp_path / "a.sh").write_bytes(content)
    with pytest.raises(LayoutError, match=message):
        read_config(tmp_path / "a.sh")


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


# Scripts that would take long to follow are read fast, or are an error.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{'if [ $A = 1 ]; then B=1; fi;' * 2_000}{TORCHRUN} 2", ""),
        (
            f"{'if [ $A = 1 ]; then ' * 300}B=1{'; fi' * 300}\n{TORCHRUN} 2",
            "text is nested too deeply",
        ),
        (f"f() {{ f; f; }}\nf\n{TORCHRUN} 2", ""),
        (f"{'for a in 1 2 3 4 5 6 7 8; do ' * 6}{TORCHRUN} $a{'; done' * 6}", "too long to follow"),
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
    assert "is outside the folder of the file; pass it, as in --include" in config.problems[0]
    assert "hunter2" not in str(config)
    assert "root:" not in str(config)
    if "secret" not in name and "etc" not in name:
        included = read_config(job / "a.yaml", include=[job.parent])
        assert (included.world_size, included.problems) == (8, ())


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


# A file with many tables is read fast. One with more values than the limit is a problem.
def test_thousands_of_tables():
    text = "".join(f"[t{at}]\n" for at in range(16_000))
    with within(5):
        config = read_config(f"[parallelism]\ntensor_parallel_degree = 2\n{text}", 8)
    assert config.problems == ()
    with within(5), pytest.raises(LayoutError, match="more than 20,000 values"):
        read_config("".join(f"[{at}]\n" for at in range(21_000)))


# A command prints the name of a file without the characters that a terminal interprets.
def test_terminal_escapes(tmp_path, in_process):
    file = tmp_path / "a\x1b[1m.sh"
    file.write_text(f"{TORCHRUN} 8 --tensor-model-paralel-size 3")
    done = in_process("plan", str(file))
    assert "1m.sh:1 --tensor-model-paralel-size 3 is an unknown option" in done.stdout
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout + done.stderr)

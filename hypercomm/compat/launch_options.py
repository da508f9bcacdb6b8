"""Tables for launch files: names of sizes, patterns of frameworks' files, and rules for sizes.

Sources of the names: Megatron-LM, `megatron/training/arguments.py`; torchtitan, `config/`;
accelerate, `parallelism_config.py`; DeepSpeed 0.19.8, `__init__.py` and `runtime/`; verl,
`trainer/config`; slime, `utils/arguments.py`; NeMo-RL, `examples/configs`; vLLM and SGLang, their
command lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_NAMES = {
    "tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size tp "
    "autotp_size",
    "pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp_size pp",
    "cp": "context_parallel_size context_parallel_degree cp_size cp",
    "ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size ep "
    "autoep_size",
    "expt_tp": "expert_tensor_parallel_size expert_tensor_parallel_degree etp_size etp",
    "dp": "data_parallel_size dp_size dp",
    "dp_replicate": "data_parallel_replicate_degree dp_replicate_size",
    "dp_shard": "data_parallel_shard_degree dp_shard_size",
    "sp": "sequence_parallel_size ulysses_sequence_parallel_size sp_size",
    "fsdp": "fsdp_size",
    "hpz": "zero_hpz_partition_size",
    "engine": "num_gpus_per_engine",
    "stage": "stage zero_stage",
    "sharding": "distributed_type",
    "order": "order",
    "mesh": "device_mesh mesh_shape",
    "mesh_names": "mesh_dim_names",
    "pp_before_dp": "use_tp_pp_dp_mapping",
    "sequence_parallel": "sequence_parallel",
    "dp_attention": "enable_dp_attention",
    "expert_parallel": "enable_expert_parallel",
    "nodes": "nnodes num_nodes actor_num_nodes num_machines",
    "slurm_nodes": "nodes",
    "gpus_per_node": "nproc_per_node n_gpus_per_node gpus_per_node actor_num_gpus_per_node",
    "gpus": "ngpu num_gpus devices gres",
    "tasks_per_node": "ntasks_per_node",
    "ranks": "num_processes",
    "tasks": "ntasks",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
"""The size or choice that each key of a launch file sets."""

TEXTS = {
    "order": r"[a-z]+(-[a-z]+)+",
    "mesh": r"[\d,\s()\[\]]+",
    "mesh_names": r".+",
    "sharding": r"fsdp",
}
"""The pattern of each choice whose value is a text."""

SWITCHES = {"pp_before_dp", "sequence_parallel", "dp_attention", "expert_parallel"}
PARALLEL = {*list(_NAMES)[: list(_NAMES).index("stage")], "mesh"}
"""The sizes of modules. The other keys describe the world or choices."""

WORLD = set(list(_NAMES)[list(_NAMES).index("nodes") :])

WEAK = {"gpus", "slurm_nodes", "stage"}
"""The sizes whose keys have another meaning if the value is not a number."""

SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "gpus_per_node": ("SLURM_GPUS_PER_NODE",),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS",),
}
"""The environment variables that SLURM sets from each of its options."""

_PREFIX = re.compile(r"(vllm|sglang|rollout|encoder|teacher|critic|parallelism_config)_(\w+)")
"""A flag of one module of the program, such as `--vllm-tensor-parallel-size`."""

_PARTS = {"vllm": "rollout", "sglang": "rollout", "parallelism_config": "parallelism"}
"""Maps a prefix to the name of its module, if the two differ."""

_TRANSPARENT = re.compile(
    r"\d+|actor_rollout_ref|cluster|colocated|config|distributed|engine|env|expert_parallel|"
    r"megatron|model|parallelism|resources|strategy|tensor_parallel|trainer|zero_optimization|"
    r"\w+_(args|cfg|config|kwargs)"
)
"""The parts of a key that are not the names of modules."""

SERVING = re.compile(r"\brollout|generation|inference|vllm|sglang|trtllm")
"""A pattern that matches words in the keys of inference engines."""


def module_and_size(path: Sequence[str]) -> tuple[str, str]:
    """Return the module of a key, and the size that the key sets.

    The module is "" for a key that applies to the whole file. The size is "" for a key that sets no
    size.

    Example:
        >>> module_and_size(("actor_rollout_ref", "ref", "megatron", "tensor_model_parallel_size"))
        ('ref', 'tp')
        >>> module_and_size(("sglang_dp_size",)), module_and_size(("seed",))
        (('rollout', 'dp'), ('', ''))
    """
    *parts, name = path
    prefix = _PREFIX.fullmatch(name)
    if name not in SIZES and prefix and prefix[2] in SIZES:
        parts.append(_PARTS.get(prefix[1], prefix[1]))
        name = prefix[2]
    module = ".".join(part for part in parts if not _TRANSPARENT.fullmatch(part))
    return module, SIZES.get(name, "")


_LONG = tuple(name for name, size in SIZES.items() if size not in WORLD and len(name) >= 12)
"""The keys of sizes and choices that are long enough to recognise a misspelling."""

_CLOSE = 0.92
"""The least similarity of a misspelt key, which is one or two letters in a long key."""


def similar_size(path: Sequence[str]) -> str:
    """Return the key of a size that a key resembles, or "" if there is none.

    The key must set no size itself (see `module_and_size`). Short keys are never found, because
    frameworks have many of them.

    Example:
        >>> similar_size(("tensor_model_paralel_size",)), similar_size(("mp_size",))
        ('tensor_model_parallel_size', '')
        >>> similar_size(("actor", "sglang_tensor_paralel_size",))
        'sglang_tensor_parallel_size'
    """
    name = path[-1]
    for other in ("no_", "ds_"):  # --no-enable-expert-parallel, --ds-sequence-parallel-size
        if name.removeprefix(other) in SIZES:
            return ""
    prefix = _PREFIX.fullmatch(name)
    for begin, rest in [("", name), *([(f"{prefix[1]}_", prefix[2])] if prefix else [])]:
        if close := difflib.get_close_matches(rest, _LONG, 1, _CLOSE):
            return begin + close[0]
    return ""


OWN = {"fsdp"}
"""The sizes that a module does not inherit from another module."""


class Framework(NamedTuple):
    """A framework, and the pattern that recognises its files.

    Attributes:
        name: The name of the framework.
        mark: A pattern that matches a part of the framework's files.
        kind: The kind of its modules, for `framework_layouts`.
        serving: The kind of its inference engines.
        modules: The modules that exist even if none of their sizes is given.
        parents: Maps a module to the module that provides its default sizes.
        defaults: The default sizes that other frameworks do not share.
    """

    name: str
    mark: str
    kind: str
    serving: str = "vllm"
    modules: tuple[str, ...] = ()
    parents: Mapping[str, str] = {}
    defaults: Mapping[str, int] = {}


_SWIFT = "(?:sft|pt|rlhf|export|infer|rollout)"
_VERL_MEGATRON = (
    r"(?s)\A(?=.*\bactor_rollout_ref\b).*(?:ppo_megatron_trainer|\bstrategy[=:]\s*megatron)"
)
_VERL_SFT_MEGATRON = r"(?s)\A(?=.*\bverl\.trainer\b).*\bengine\.tensor_model_parallel_size"
_SGLANG = (
    r"\bsglang serve\b|\bsglang(?:_router)?\.launch_server\b|\bsglang[./]srt\b|"
    r"\blmsysorg/sglang\b|\bdynamo\.sglang\b"
)
_VLLM = r"\bvllm serve\b|\bvllm\.entrypoints\b|\bvllm/vllm-|\bdynamo\.vllm\b"
_SIZE = r"(?:tensor|pipeline|expert)[-_]model[-_]parallel[-_]size"
FRAMEWORKS = (
    Framework("verl", _VERL_MEGATRON, "megatron", "vllm", ("actor",), {"ref": "actor"}),
    Framework("verl", r"\bactor_rollout_ref\b", "fsdp", "vllm", ("actor",), {"ref": "actor"}),
    Framework("verl", _VERL_SFT_MEGATRON, "megatron"),
    Framework("verl", r"\bverl\.trainer\b", "fsdp"),
    Framework("NeMo-RL", r"\b(?:megatron|dtensor)_cfg\b", "automodel", defaults={"expt_tp": 1}),
    Framework("slime", r"--(?:actor-num-gpus|rollout-num-gpus)", "megatron", "sglang"),
    Framework("ms-swift", rf"(?:^|\s)megatron {_SWIFT}\b", "megatron", defaults={"expt_tp": 1}),
    Framework("ms-swift", rf"(?:^|\s)swift {_SWIFT}\b", "swift"),
    Framework("torchtitan", r"_parallel_(?:\w+_)?degree\b", "torchtitan", modules=("training",)),
    Framework(
        "accelerate",
        r"parallelism_config|compute_environment|num_machines|\bdistributed_type:",
        "accelerate",
        modules=("training",),
    ),
    Framework("Megatron-Bridge", r"(?i:megatron[._-]bridge)", "megatron"),
    Framework("NeMo", rf"(?s)\A(?=.*\bexp_manager\b).*{_SIZE}|megatron_gpt_\w+\.py", "megatron"),
    Framework("SGLang", _SGLANG, "sglang", "sglang", ("inference",)),
    Framework("vLLM", _VLLM, "vllm", "vllm", ("inference",)),
    Framework("Megatron-LM", rf"{_SIZE}|context[-_]parallel[-_]size|(?i:megatron)", "megatron"),
    Framework("DeepSpeed", r"zero_optimization|\bauto[te]p_size\b", "deepspeed"),
    Framework("FSDP2", r"\bdevice_mesh\b|\bmesh_shape\b", "mesh"),
    Framework("DeepSpeed", r"\bsequence_parallel_size\b", "deepspeed"),
    Framework("Megatron-LM", r"(?m)\b(?:TP|PP)(?:_SIZE)?=", "megatron"),
)
"""A file belongs to the first framework whose `mark` matches a part of the file."""


class Rule(NamedTuple):
    """A combination of sizes that a framework ignores, rejects or completes.

    Attributes:
        kind: The kind of the module.
        applies: A function that returns whether sizes have this combination. Sizes that are not
            given are 1.
        problem: The message, with fields such as {tp} for sizes.
        drops: The sizes that the framework ignores.
    """

    kind: str
    applies: Callable[[Mapping[str, Any]], bool]
    problem: str
    drops: tuple[str, ...] = ()


RULES = (
    Rule(
        "megatron",
        lambda given: "expt_tp" not in given and given["tp"] > 1 and given["ep"] > 1,
        "the tensor parallel size of the experts is not given, and is taken from tp={tp}",
    ),
    Rule(
        "megatron",
        lambda given: "sequence_parallel" in given and given["tp"] == 1,
        "sequence_parallel is ignored, because tp=1",
    ),
    Rule(
        "megatron",
        lambda given: "dp" in given,
        "Megatron has no option for dp={dp}, because it infers dp from the other sizes",
        ("dp",),
    ),
    Rule(
        "megatron",
        lambda given: "order" in given,
        "Megatron's command line has no --order, only initialize_model_parallel has it; "
        "--use-tp-pp-dp-mapping places pp before dp",
    ),
    Rule(
        "torchtitan",
        lambda given: given["expt_tp"] > 1,
        "torchtitan 0.3 has no expert_tensor_parallel_degree, because it does not split experts "
        "over tp",
        ("expt_tp",),
    ),
    Rule(
        "deepspeed",
        lambda given: given["sp"] > 1 and "dp" not in given,
        "DeepSpeed 0.19 creates groups of sequence_parallel_size={sp} ranks only if "
        "data_parallel_size or an mpu is also given",
    ),
    Rule(
        "deepspeed",
        lambda given: given["hpz"] > 1 and given["stage"] != 3,
        "zero_hpz_partition_size={hpz} is ignored, because it needs ZeRO stage 3",
        ("hpz",),
    ),
    Rule(
        "deepspeed",
        lambda given: given["ep"] > 1 and given["tp"] > 1,
        "DeepSpeed folds autoep_size={ep} into the tensor parallel ranks; this is not shown",
        ("ep",),
    ),
    Rule(
        "automodel",
        lambda given: given["ep"] > 1 and given["tp"] > 1,
        "Automodel's mesh of experts with tp={tp} is not shown",
        ("ep",),
    ),
    Rule(
        "vllm",
        lambda given: ("expert_parallel" in given or given["ep"] > 1) and given["pp"] > 1,
        "each stage splits its experts over its tp and dp ranks; "
        "the layout of the experts is not shown",
        ("ep", "expert_parallel"),
    ),
)


class _Given(dict[str, Any]):
    """The sizes of a module. A missing size is 1."""

    def __missing__(self, name: str) -> int:
        return 1


def apply_rules(kind: str, sizes: dict[str, Any]) -> list[str]:
    """Remove the sizes that a framework ignores, and return messages about all problems.

    Example:
        >>> sizes = {"tp": 2, "dp": 4}
        >>> apply_rules("megatron", sizes), sizes
        (['Megatron has no option for dp=4, because it infers dp from the other sizes'], {'tp': 2})
    """
    given = _Given(sizes)
    found = [rule for rule in RULES if rule.kind == kind and rule.applies(given)]
    for size in [size for rule in found for size in rule.drops]:
        sizes.pop(size, None)
    return [rule.problem.format_map(given) for rule in found]

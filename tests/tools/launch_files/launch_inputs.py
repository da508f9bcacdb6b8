"""Small inputs with the parallel parts of real launch files, and the sizes that upstream reads.

Each input names a public repository and a file. The text of the input restates the parallel part of
the file: the flags, keys and variables that set sizes, in the format of the file. The expected
sizes were read from the file by hand. From these sizes, the tests compute the ranks of groups with
upstream's code.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Megatron:
    """Sizes for megatron-core's RankGenerator. dp is inferred from the other sizes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Titan:
    """Sizes for torchtitan's ParallelDims."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Mesh:
    """Meshes for torch's init_device_mesh: names and shape. The last dim varies fastest."""

    meshes: dict = field(default_factory=dict)


@dataclass(frozen=True)
class VLLM:
    """Sizes of vLLM's parallel_state, and the number of engines."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    engines: int = 1
    expert: bool = False


@dataclass(frozen=True)
class SGLang:
    """Sizes of SGLang's parallel_state. `attn_dp` is the dp size of attention, inside tp."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attn_dp: int = 1
    engines: int = 1


@dataclass(frozen=True)
class Input:
    repository: str
    path: str
    text: str
    framework: str
    world: int
    modules: dict
    given_world: int | None = None
    problems: tuple = ()  # a phrase from the text of each problem

    @property
    def name(self):
        return f"{self.repository}:{self.path}"


INPUTS = [
    # ---- Megatron-LM ----------------------------------------------------------------------------
    Input(
        "NVIDIA/Megatron-LM",
        "examples/gpt3/train_gpt3_175b_distributed.sh",
        """
GPUS_PER_NODE=8
NUM_NODES=1
TORCH=( --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES )
SPLIT=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
torchrun ${TORCH[@]} train.py ${SPLIT[@]}
""",
        "Megatron-LM",
        256,
        {"training": Megatron(tp=8, pp=16)},
        given_world=256,
    ),
    Input(
        "NVIDIA/Megatron-LM",
        "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        """
GPUS_PER_NODE=2
NNODES=${SLURM_NNODES:-"1"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
SPLIT=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 2   # of two experts
    --sequence-parallel
)
""",
        "Megatron-LM",
        2,
        {"training": Megatron(ep=2)},
        problems=("sequence_parallel is ignored",),
    ),
    Input(
        "NVIDIA/Megatron-LM",
        "examples/deepseek_v3/train_deepseek_v3_slurm.sh",
        """#!/bin/bash
#SBATCH --nodes=8       # hosts
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
srun bash -c 'podman run image bash -c \\
"cd megatron; \\
MODEL_SIZE=671B \\
TP=2 PP=16 ETP=1 EP=4 \\
bash train.sh"'
""",
        "Megatron-LM",
        64,
        {"training": Megatron(tp=2, pp=16, ep=4, etp=1)},
    ),
    Input(
        "NVIDIA/Megatron-LM",
        "tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp2_pp1_cp2/model_config.yaml",
        """
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 1
  --context-parallel-size: 2
  --sequence-parallel: true
""",
        "Megatron-LM",
        8,
        {"training": Megatron(tp=2, cp=2)},
        given_world=8,
    ),
    Input(
        "NVIDIA/Megatron-LM",
        "examples/multimodal/nvlm/sft_qwen20_72b_internvit_6b.sh",
        """
OPTIONS=" \\
    --tensor-model-parallel-size 8  \\
    --pipeline-model-parallel-size 4 \\
"
if [[ $DEBUG -eq 1 ]]; then
    torchrun --nproc_per_node 8 train.py ${OPTIONS}
fi
""",
        "Megatron-LM",
        32,
        {"training": Megatron(tp=8, pp=4)},
        given_world=32,
    ),
    # ---- slime ----------------------------------------------------------------------------------
    Input(
        "THUDM/slime",
        "scripts/run-qwen3-30B-A3B.sh",
        """
PERF=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
)
ENGINE=( --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 )
ray start --head --num-gpus 8
ray job submit -- python3 train.py \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 8 \\
   --colocate ${PERF[@]} ${ENGINE[@]}
""",
        "slime",
        8,
        {"training": Megatron(tp=4, ep=8, etp=1), "rollout": SGLang(tp=8)},
    ),
    Input(
        "THUDM/slime",
        "scripts/run-deepseek-r1.sh",
        """
PERF=(
   --tensor-model-parallel-size 8
   --sequence-parallel
   --pipeline-model-parallel-size 4
   --context-parallel-size 4
   --expert-model-parallel-size 32
   --expert-tensor-parallel-size 1
)
ENGINE=(
   --rollout-num-gpus-per-engine 64
   --sglang-ep-size 64
   --sglang-enable-dp-attention
   --sglang-dp-size 8
   --sglang-moe-dense-tp-size 1
)
python3 train.py --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate
""",
        "slime",
        128,
        {
            "training": Megatron(tp=8, pp=4, cp=4, ep=32, etp=1),
            "rollout": SGLang(tp=64, ep=64, attn_dp=8, engines=2),
        },
    ),
    Input(
        "THUDM/slime",
        "scripts/run-kimi-k2-Instruct.sh",
        """
PERF=(
   --tensor-model-parallel-size 8
   --sequence-parallel
   --pipeline-model-parallel-size 8
   --context-parallel-size 4
   --expert-model-parallel-size 32
   --expert-tensor-parallel-size 1
)
ENGINE=(
   --rollout-num-gpus-per-engine 16
   --sglang-enable-dp-attention
   --sglang-dp-size 8
   --sglang-ep-size 16
#    --sglang-moe-a2a-backend deepep
)
python3 train.py --actor-num-nodes 32 --actor-num-gpus-per-node 8 --colocate
""",
        "slime",
        256,
        {
            "training": Megatron(tp=8, pp=8, cp=4, ep=32, etp=1),
            "rollout": SGLang(tp=16, ep=16, attn_dp=8, engines=16),
        },
    ),
    Input(
        "THUDM/slime",
        "scripts/run-qwen3-235B-A22B.sh",
        """
PERF=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 4
   --context-parallel-size 2
   --expert-model-parallel-size 16
   --expert-tensor-parallel-size 1
)
ENGINE=(
   --rollout-num-gpus-per-engine 32
   --sglang-enable-dp-attention
   --sglang-dp-size 4
   --sglang-ep-size 32
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)
)
python3 train.py --actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 64
""",
        "slime",
        64,
        {
            "training": Megatron(tp=4, pp=4, cp=2, ep=16, etp=1),
            "rollout": SGLang(tp=32, ep=32, attn_dp=4, engines=2),
        },
    ),
    Input(
        "THUDM/slime",
        "scripts/run-glm4.7-30B-A3B.sh",
        """
PERF=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 2
   --context-parallel-size 2
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
)
python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
""",
        "slime",
        8,
        {"training": None},  # 8 * 2 ranks of experts do not fit in 8
        problems=(
            "needs a multiple of 16 ranks, for example 16; the world has 8; pp=1 or ep=4 would fit",
        ),
    ),
    # ---- verl -----------------------------------------------------------------------------------
    Input(
        "volcengine/verl",
        "examples/grpo_trainer/run_deepseek671b_math_megatron_80gb.sh",
        """set -x
NODES=32
PP=16
TP=1
EP=16
ETP=1
INFER_TP=32
n=$(((2048 + 4096) * 1))
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer'\\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$INFER_TP \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=$NODES \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_stage=4 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \\
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=$PP \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \\
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=$EP \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$ETP \\
    actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=$ETP $@
""",
        "verl",
        256,
        {
            "actor": Megatron(pp=16, ep=16, etp=1),
            "ref": Megatron(pp=16, ep=16, etp=1),
            "rollout": VLLM(tp=32, engines=8),
        },
    ),
    Input(
        "volcengine/verl",
        "examples/grpo_trainer/run_qwen3_vl-235b-megatron.sh",
        """
GEN_TP=${GEN_TP:-16}
CP=${CP:-2}
TP=${TP:-4}
PP=${PP:-8}
EP=${EP:-8}
ETP=${ETP:-1}
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.actor.megatron.context_parallel_size=$CP \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$ETP \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$GEN_TP \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=8
""",
        "verl",
        64,
        {
            "actor": Megatron(tp=4, pp=8, cp=2, ep=8, etp=1),
            "rollout": VLLM(tp=16, engines=4),
        },
    ),
    Input(
        "volcengine/verl",
        "examples/grpo_trainer/run_qwen2_5-7b_math_megatron_diff_tp.sh",
        """
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1
""",
        "verl",
        8,
        {
            "actor": Megatron(tp=2, pp=2),
            "ref": Megatron(tp=2, pp=2),  # pp is taken from the actor
            "rollout": VLLM(tp=4, engines=2),
        },
    ),
    Input(
        "volcengine/verl",
        "examples/gmpo_trainer/test_dapo_7b_math.sh",
        """
NNODES=${NNODES:-8}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
sp_size=4
gen_tp=4
fsdp_size=32
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp} \\
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=${sp_size} \\
    actor_rollout_ref.actor.fsdp_config.fsdp_size=${fsdp_size} \\
    trainer.n_gpus_per_node="${NGPUS_PER_NODE}" \\
    trainer.nnodes="${NNODES}"
""",
        "verl",
        64,
        {
            "actor": Mesh(
                {
                    "": (("ddp", "fsdp"), (2, 32)),
                    "sequence": (("dp", "sp"), (16, 4)),
                }
            ),
            "ref": Mesh({"": (("ddp", "fsdp"), (1, 64)), "sequence": (("dp", "sp"), (16, 4))}),
            "rollout": VLLM(tp=4, engines=16),
        },
    ),
    # ---- ms-swift -------------------------------------------------------------------------------
    Input(
        "modelscope/ms-swift",
        "examples/megatron/moe/deepseek_v3.sh",
        """# 8 * 60GiB
NPROC_PER_NODE=8 \\
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
megatron sft \\
    --pipeline_model_parallel_size 2 \\
    --expert_model_parallel_size 4 \\
    --packing true
""",
        "ms-swift",
        8,
        {"training": Megatron(pp=2, ep=4, etp=1)},
    ),
    Input(
        "modelscope/ms-swift",
        "examples/megatron/multi-node/node1.sh",
        """
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
NNODES=2 \\
NODE_RANK=0 \\
NPROC_PER_NODE=4 \\
megatron sft \\
    --tensor_model_parallel_size 4 \\
    --sequence_parallel true
""",
        "ms-swift",
        8,
        {"training": Megatron(tp=4, etp=1)},  # the default of ms-swift
    ),
    Input(
        "modelscope/ms-swift",
        "examples/megatron/grpo/moe_colocate_full.sh",
        """
NPROC_PER_NODE=8 \\
megatron rlhf \\
    --context_parallel_size 1 \\
    --tensor_model_parallel_size 4 \\
    --expert_model_parallel_size 4 \\
    --pipeline_model_parallel_size 2 \\
    --use_vllm true \\
    --vllm_tensor_parallel_size 8
""",
        "ms-swift",
        8,
        {"training": Megatron(tp=4, pp=2, ep=4, etp=1), "rollout": VLLM(tp=8)},
    ),
    # ---- torchtitan -----------------------------------------------------------------------------
    Input(
        "pytorch/torchtitan",
        "torchtitan/models/llama3/train_configs/llama3_405b.toml",
        """
[training]
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # within a host
pipeline_parallel_degree = 1
context_parallel_degree = 1
""",
        "torchtitan",
        128,
        {"training": Titan(tp=8)},
        given_world=128,
    ),
    Input(
        "pytorch/torchtitan",
        "torchtitan/models/deepseek_v3/train_configs/deepseek_v3_671b.toml",
        """
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1
""",
        "torchtitan",
        64,
        {"training": Titan()},
        given_world=64,
    ),
    Input(
        "pytorch/torchtitan",
        "configs/deepseek_16b-8xb200-131k.toml",
        """
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
expert_parallel_degree = 1
tensor_parallel_degree = 1
""",
        "torchtitan",
        8,
        {"training": Titan(dp_shard=8)},
        given_world=8,
    ),
    # ---- NeMo-RL and NeMo -----------------------------------------------------------------------
    Input(
        "NVIDIA-NeMo/RL",
        "examples/configs/grpo_dapomath17k_dsv3_megatron.yaml",
        """
policy:
  dtensor_cfg:
    enabled: false
  make_sequence_length_divisible_by: ${policy.megatron_cfg.tensor_model_parallel_size}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 8
    expert_tensor_parallel_size: 1
    expert_model_parallel_size: 32
    pipeline_model_parallel_size: 16
    context_parallel_size: 4
    sequence_parallel: true
  generation:
    vllm_cfg:
      tensor_parallel_size: 32
cluster:
  gpus_per_node: 8
  num_nodes: 64
""",
        "NeMo-RL",
        512,
        {
            "policy": Megatron(tp=8, pp=16, cp=4, ep=32, etp=1),
            "policy.generation": VLLM(tp=32, engines=16),
        },
    ),
    Input(
        "NVIDIA-NeMo/RL",
        "examples/configs/grpo_math_1B.yaml",
        """
policy:
  dtensor_cfg:
    enabled: true
    tensor_parallel_size: 1
    context_parallel_size: 1
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 1
    expert_model_parallel_size: 1
  generation:
    vllm_cfg:
      tensor_parallel_size: 1
      pipeline_parallel_size: 1
      expert_parallel_size: 1
    colocated:
      enabled: true
      resources:
        gpus_per_node: null
        num_nodes: null
cluster:
  gpus_per_node: 1
  num_nodes: 1
""",
        "NeMo-RL",
        1,
        {
            "policy": Mesh({"": (("dp_replicate", "dp", "cp", "tp"), (1, 1, 1, 1))}),
            "policy.generation": VLLM(),
        },
    ),
    Input(
        "NVIDIA-NeMo/RL",
        "examples/configs/recipes/llm/dpo-nanov3-30B3AB-1n8g-fsdp8ep8-automodel.yaml",
        """
policy:
  dtensor_cfg:
    _v2: true
    expert_parallel_size: 8
cluster:
  gpus_per_node: 8
  num_nodes: 1
""",
        "NeMo-RL",
        8,
        {
            "policy": Mesh(
                {
                    "": (("dp_replicate", "dp", "cp", "tp"), (1, 8, 1, 1)),
                    "expert": (("ep_shard", "ep"), (1, 8)),
                }
            )
        },
    ),
    Input(
        "NVIDIA/NeMo",
        "examples/nlp/language_modeling/conf/megatron_gpt_config.yaml",
        """
trainer:
  devices: 1
  num_nodes: 1
exp_manager:
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${model.tensor_model_parallel_size}, 1}
model:
  tensor_model_parallel_size: 1 # inside a layer
  pipeline_model_parallel_size: 1
""",
        "NeMo",
        1,
        {"training": Megatron()},
    ),
    # ---- accelerate -----------------------------------------------------------------------------
    Input(
        "huggingface/accelerate",
        "examples/torch_native_parallelism/configs/tp_hsdp.yaml",
        """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
""",
        "accelerate",
        8,
        {"training": Mesh({"": (("dp_replicate", "dp_shard", "cp", "sp", "tp"), (2, 2, 1, 1, 2))})},
    ),
    Input(
        "huggingface/accelerate",
        "examples/torch_native_parallelism/configs/cp.yaml",
        """
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 8
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
""",
        "accelerate",
        8,
        {"training": Mesh({"": (("dp_replicate", "dp_shard", "cp", "sp", "tp"), (1, 1, 8, 1, 1))})},
    ),
    # ---- DeepSpeed ------------------------------------------------------------------------------
    Input(
        "deepspeedai/DeepSpeedExamples",
        "training/tensor_parallel/hf_integration/configs/ds_config.json",
        """{
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
      "stage": 2
    },
    "tensor_parallel":{
      "autotp_size": 4
    }
}""",
        "DeepSpeed",
        16,
        {"training": Mesh({"": (("dp", "sp", "tp"), (4, 1, 4))})},
        given_world=16,
    ),
    Input(
        "deepspeedai/DeepSpeedExamples",
        "training/expert_parallel/configs/ds_autoep_zero1_qwen3_5_moe.json",
        """{
    "zero_optimization": {"stage": 1},
    "expert_parallel": {
        "enabled": true,
        "autoep_size": 8
    }
}""",
        "DeepSpeed",
        16,
        {
            "training": Mesh(
                {"": (("dp", "sp", "tp"), (16, 1, 1)), "expert": (("expt_dp", "ep"), (2, 8))}
            )
        },
        given_world=16,
    ),
    Input(
        "deepspeedai/DeepSpeedExamples",
        "benchmarks/autosp/configs/autosp_config.json",
        """{
    "zero_optimization": {
        "stage": 0
    },
    "compile": {
\t"passes": ["autosp"]
    },
    "sequence_parallel_size": 2
}""",
        "DeepSpeed",
        8,
        {"training": Mesh({"": (("dp", "sp", "tp"), (4, 2, 1))})},
        given_world=8,
        problems=("only if data_parallel_size or an mpu is also given",),
    ),
    # ---- inference engines ----------------------------------------------------------------------
    Input(
        "vllm-project/vllm",
        "docs/serving/data_parallel_deployment.md",
        "vllm serve $MODEL --data-parallel-size 4 --tensor-parallel-size 2",
        "vLLM",
        8,
        {"inference": VLLM(tp=2, dp=4)},
    ),
    Input(
        "sgl-project/sglang",
        "docs/basic_usage/deepseek_v3.md",
        "python3 -m sglang.launch_server --enable-dp-attention --tp 16 --dp 2 --nnodes 2",
        "SGLang",
        16,
        {"inference": SGLang(tp=16, attn_dp=2)},
    ),
]

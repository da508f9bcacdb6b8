
TP=${TP:-2}
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size 2 \
    --expert-model-parallel-size 4 --expert-tensor-parallel-size 1

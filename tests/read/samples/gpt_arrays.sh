#!/bin/bash

# Runs a 7B model on 8 GPUs; the arrays are those of the examples.

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=$2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)

GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096   # don't change it
    --num-attention-heads 32
    --seq-length 4096
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --bf16
    # --fp16
    --fp8-format hybrid
    --fp8-amax-history-len 1024
    --fp8-amax-compute-algo max
    --lr 3.0e-4
)
if [ "$WORLD_SIZE" -gt 8 ]; then
    TRAINING_ARGS+=(--overlap-grad-reduce)
fi

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    "${TRAINING_ARGS[@]}" \
    --use-distributed-optimizer --fp8-param-gather \
    --save $CHECKPOINT_PATH --data-path $DATA_PATH

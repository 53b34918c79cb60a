#!/bin/bash
if [ -z ${HF_MODEL_CKPT} ]; then
    HF_MODEL_CKPT=org/model
fi
MODEL_ARGS=" \
    --save-interval 100000 \
    --bf16 \
    --accumulate-allreduce-grads-in-fp32 \
    --num-layers 32 \
    --attention-softmax-in-fp32 \
"
export MODEL_ARGS

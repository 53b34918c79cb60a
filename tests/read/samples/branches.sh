#!/usr/bin/env bash
set -euo pipefail
PRECISION=${PRECISION:-bf16}
USE_FP8=$1
MODEL="--num-layers 2 --hidden-size 64 --micro-batch-size 1"

if [[ $PRECISION == bf16 ]]; then
    ARGS="$MODEL --bf16"
elif [[ $PRECISION == fp16 ]]; then
    ARGS="$MODEL --fp16 --loss-scale 4096"
fi

if [ "$USE_FP8" = "1" ]
then
    ARGS="${ARGS} --fp8-format e4m3 --fp8-recipe mxfp8"
fi
[ -n "${DEBUG:-}" ] && ARGS+=" --log-interval 1"

torchrun --nproc_per_node 8 pretrain_gpt.py $ARGS

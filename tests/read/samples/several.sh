#!/bin/bash
COMMON="--num-layers 4 --hidden-size 128 --micro-batch-size 2"

python -m torch.distributed.launch --nproc_per_node 8 pretrain_bert.py $COMMON --fp16
for dtype in bf16 fp16; do
    echo "running --$dtype"
    torchrun pretrain_t5.py $COMMON --$dtype --seed 1 &
done
wait
function fp8_run() {
    local recipe=$1; shift
    python3 pretrain_gpt.py ${COMMON} --bf16 --fp8-format=hybrid --fp8-recipe "$recipe" "$@"
}
fp8_run blockwise --first-last-layers-bf16
fp8_run tensorwise --fp8-margin 2

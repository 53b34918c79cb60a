#!/bin/bash
: "${PARTITION:?Set PARTITION, e.g. batch}"
: ${TP:=2}
NVIDIA_TF32_OVERRIDE=0; export NVIDIA_TF32_OVERRIDE
export NVTE_FP8_DPA_BWD=1
declare -a ARGS
ARGS+=( "--num-layers" 4 --hidden-size "$((64*TP))" )
case "$MODE" in
    fast|quick) ARGS+=(--fp8-format hybrid --fp8-recipe delayed) ;;
    *) : ;;
esac
while [[ $# -gt 0 ]]; do
    case $1 in
        --help) echo "usage: it's easy"; exit 0 ;;
        *) shift ;;
    esac
done
cat <<EOF > ds_config.json
{"fp16": {"enabled": true}}
EOF
cat > /dev/null <<'DONE'
don't read this: torchrun nothing.py --fp16 "
DONE
CMD="python pretrain_gpt.py ${ARGS[@]} --bf16 \
    --loss-scale $(cat scale.txt)"
eval "$CMD"
torchrun finetune.py --num-layers 2 --fp16 2>&1 | tee log
( cd / && python -c "print('--fp16')" )
if ! command -v nvidia-smi &> /dev/null; then echo "no GPU"; fi
bash -c "torchrun pretrain_vlm.py --num-layers 1 ${EXTRA_ARGS}"

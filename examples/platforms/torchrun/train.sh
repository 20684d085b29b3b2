#!/bin/bash
# train.sh train.py ARGS …, on each of NNODES nodes: torchrun starts failed ranks again (docs/platforms/torchrun.md).
export DEEPSPEED_UCP=${DEEPSPEED_UCP:-1}
exec torchrun --nnodes="${NNODES:-1}" --nproc-per-node="${RANKS_PER_NODE:-8}" --max-restarts="${MOST_RESTARTS:-100}" \
    --rdzv-backend=c10d --rdzv-endpoint="${HEAD:-localhost:29400}" --rdzv-id="${JOB:-train}" "$@"

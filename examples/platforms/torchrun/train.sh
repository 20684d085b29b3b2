#!/bin/bash
# Run on each node (docs/platforms.md): RENDEZVOUS=/shared/run/rdzv NNODES=1:4 train.sh train.py ARGS …
# keep_alive_*: a lost agent is detected after 1 s x 3. last_call_timeout: seconds that a start waits for more nodes.
export DEEPSPEED_UCP=${DEEPSPEED_UCP:-1}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise nodes that join connect to the store of a lost node
export TORCHELASTIC_ENABLE_FILE_TIMER=1      # the agent kills a rank that hangs
exec torchrun --nnodes="${NNODES:-1}" --nproc-per-node="${RANKS_PER_NODE:-8}" --max-restarts="${MAX_RESTARTS:-100}" \
    --rdzv-backend=c10d --rdzv-endpoint="${RENDEZVOUS:?name a file in a folder that all nodes share}" \
    --rdzv-conf=store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3 \
    --rdzv-id="${JOB:-train}" "$@"

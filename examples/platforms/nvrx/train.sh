#!/bin/bash
# Run NVRx's ft_launcher on every node (docs/platforms.md): ENDPOINT=node0:29500 train.sh train.py ARGS …
# Ranks have GRACE seconds to save when ft_launcher restarts them, and --term-timeout (1800) after SIGTERM to it.
exec ft_launcher \
    --nnodes="${NNODES:-1:2}" --nproc-per-node="${RANKS_PER_NODE:-8}" \
    --rdzv-backend=c10d --rdzv-endpoint="${ENDPOINT:-localhost:29500}" --rdzv-conf="${RDZV_CONF:-last_call_timeout=30}" \
    --max-restarts="${MAX_RESTARTS:-100}" --workers-stop-timeout="${GRACE:-300}" \
    --ft-cfg-path="${FT_CONFIG:-$(dirname "$0")/ft.yaml}" \
    --no-python ds_ucp run "$@"

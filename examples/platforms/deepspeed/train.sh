#!/bin/bash
# train.sh train.py ARGS …, on the machine that launches: the deepspeed launcher, and what starts it again
# (docs/platforms/deepspeed.md). HOSTFILE names the hosts, LAUNCHER holds further options of the launcher.
hosts=(${HOSTFILE:+--hostfile "$HOSTFILE"})
exec ds_ucp supervise "${hosts[@]}" --max-restarts "${MOST_RESTARTS:-100}" \
    -- deepspeed "${hosts[@]}" $LAUNCHER --module deepspeed_ucp run "$@"

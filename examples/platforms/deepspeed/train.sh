#!/bin/bash
# train.sh train.py ARGS …, on the machine that launches: the deepspeed launcher, and what starts it again
# (docs/platforms/deepspeed.md). Hosts are those of HOSTFILE; LAUNCHER holds further options of the launcher.
exec ds_ucp supervise --hostfile "${HOSTFILE:=/job/hostfile}" --max-restarts "${MOST_RESTARTS:-100}" \
    -- deepspeed --hostfile "$HOSTFILE" $LAUNCHER --module deepspeed_ucp run "$@"

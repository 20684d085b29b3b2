#!/bin/bash
# Run the deepspeed launcher, and restart it after a failure on the hosts that answer to ssh (docs/platforms.md):
# HOSTFILE=hosts train.sh train.py ARGS …
# LAUNCHER: further options of the launcher. PAUSE: seconds between two starts. `--module deepspeed_ucp run` enables the
# plugin, because the launcher does not pass DEEPSPEED_UCP to other nodes.
answering=$(mktemp) stopped=
trap 'rm -f "$answering"' EXIT
# Signal the process group, because the launcher does not forward signals to ranks on this machine.
trap 'stopped=yes; kill -TERM -- -$child || kill -TERM $child' TERM INT
# ssh detects a lost host after 15 s.
export PDSH_SSH_ARGS_APPEND="$PDSH_SSH_ARGS_APPEND -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
run() {
    setsid "$@" & child=$!
    until wait $child; code=$?; ! kill -0 $child 2>/dev/null; do :; done
    while kill -0 -- -$child 2>/dev/null; do sleep 0.2; done  # the launcher may end before its ranks
}

for ((start = 0; start <= ${MAX_RESTARTS:-100}; start++)); do
    if [[ -n $HOSTFILE ]]; then
        while read -r host slots; do
            [[ $host == [!#]* ]] && ssh -n -o BatchMode=yes -o ConnectTimeout=10 "$host" true && echo "$host $slots"
        done <"$HOSTFILE" >"$answering"
        (($(wc -l <"$answering") >= ${MIN_HOSTS:-1})) || { echo "fewer than ${MIN_HOSTS:-1} hosts answer"; exit 1; }
        hosts=(--hostfile "$answering" --force_multi)  # --force_multi: use pdsh even if one host is left
    fi
    [[ $stopped ]] || run deepspeed "${hosts[@]}" $LAUNCHER --module deepspeed_ucp run "$@"
    [[ $stopped || $code == 0 ]] && exit "${code:-143}"
    echo "the launcher ended with $code: restarting it in ${PAUSE:-10} s"
    run sleep "${PAUSE:-10}"
done
exit 1

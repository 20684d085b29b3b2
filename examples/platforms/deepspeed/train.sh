#!/bin/bash
# HOSTFILE=hosts train.sh train.py ARGS …, on the machine that launches: the deepspeed launcher, started again after a
# failure on the hosts that answer (docs/platforms.md). LAUNCHER holds further options of the launcher.
answering=$(mktemp) stopped=
trap 'rm -f "$answering"' EXIT
# To all of the launch: the launcher itself does not pass it to ranks of this machine.
trap 'stopped=yes; kill -TERM -- -$child || kill -TERM $child' TERM INT
export PDSH_SSH_ARGS_APPEND="$PDSH_SSH_ARGS_APPEND -o ServerAliveInterval=5 -o ServerAliveCountMax=3"  # notice a lost host
run() {
    setsid "$@" & child=$!
    until wait $child; code=$?; ! kill -0 $child 2>/dev/null; do :; done
    while kill -0 -- -$child 2>/dev/null; do sleep 0.2; done  # the launcher may end before its ranks
}

for ((start = 0; start <= ${MOST_RESTARTS:-100}; start++)); do
    if [[ -n $HOSTFILE ]]; then
        while read -r host slots; do
            [[ $host == [!#]* ]] && ssh -n -o BatchMode=yes -o ConnectTimeout=10 "$host" true && echo "$host $slots"
        done <"$HOSTFILE" >"$answering"
        (($(wc -l <"$answering") >= ${MIN_HOSTS:-1})) || { echo "fewer than ${MIN_HOSTS:-1} hosts answer"; exit 1; }
        hosts=(--hostfile "$answering" --force_multi)  # without --force_multi a single host's ranks would start here
    fi
    [[ $stopped ]] || run deepspeed "${hosts[@]}" $LAUNCHER --module deepspeed_ucp run "$@"
    [[ $stopped || $code == 0 ]] && exit "${code:-143}"
    echo "the launcher ended with $code: once more in ${PAUSE:-10} s"
    run sleep "${PAUSE:-10}"
done
exit 1

#!/bin/bash
# A training run as plain processes over ssh, one a host, which share a file system.
#
#   HOSTS=node1,node2,node3 launch/processes.sh \
#       wedlm train --config configs/wedlm_8b.yaml output=/mnt/share/runs/wedlm_8b
#
# HOSTS=local:2 starts two processes here, to try things. When one ends badly, the others are told
# to end, and the script has its status: put launch/restart.sh before it for a restart loop.
#
#   PORT    on which the first host listens [8476]
#   GRACE   seconds to end in, before they are killed [600]
#   REMOTE  how a command is run elsewhere [ssh -tt]
set -u
: "${HOSTS:?names of the hosts, or local:N}"
case $HOSTS in
    local:*)
        hosts=()
        for ((i = 0; i < ${HOSTS#local:}; i++)); do hosts+=(localhost); done
        remote=()
        ;;
    *)
        read -ra hosts <<<"${HOSTS//,/ }"
        read -ra remote <<<"${REMOTE:-ssh -tt}"
        ;;
esac

declare -A alive=() # by process id
stop() { [ "${#alive[@]}" -eq 0 ] || kill -TERM "${!alive[@]}" 2>/dev/null; }
trap stop TERM INT

number=0
for host in "${hosts[@]}"; do
    command=("$@" --coordinator "${hosts[0]}:${PORT:-8476}" \
        --num-processes "${#hosts[@]}" --process-id "$number")
    if [ "${#remote[@]}" -eq 0 ]; then
        "${command[@]}" &
    else
        # With a terminal of its own (-tt), the process ends when its ssh does.
        "${remote[@]}" "$host" "cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}")" &
    fi
    alive[$!]=$host
    number=$((number + 1))
done

worst=0 killer=
while [ "${#alive[@]}" -gt 0 ]; do
    ended=
    wait -n -p ended "${!alive[@]}"
    status=$?
    [ -n "$ended" ] || continue # a signal came, not an end
    unset "alive[$ended]"
    if [ "$status" -ne 0 ] && [ "$worst" -eq 0 ]; then
        worst=$status
        stop
        set -m # a group of its own, so that its sleep ends with it
        (sleep "${GRACE:-600}" && kill -KILL "${!alive[@]}" 2>/dev/null) &
        killer=$!
        set +m
    fi
done
[ -z "$killer" ] || kill -- "-$killer" 2>/dev/null
exit "$worst"

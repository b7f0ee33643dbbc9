#!/bin/bash
# Runs a command again until it is done: a restart loop where no cluster has one.
#
#   launch/restart.sh wedlm train --config configs/wedlm_8b.yaml output=/mnt/share/runs/wedlm_8b
#
# It ends with the command's status when that is 0 (done), 2 or 65 (bad input, or too many bad
# records, which a restart would not mend), 130 or 143 (somebody asked it to stop). Anything else, such as a lost host or storage that
# fails (74), is tried again.
#
#   MAX_RESTARTS   how often [20]
#   PAUSE          seconds before each [15]
set -u
restarts=0 child=
# Ctrl-C and SIGTERM are for the command, which saves its state; this script waits for it.
trap '[ -n "$child" ] && kill -TERM "$child"' TERM
trap '[ -n "$child" ] && kill -INT "$child"' INT

while true; do
    # A command in the background would ignore Ctrl-C without job control.
    set -m
    "$@" &
    child=$!
    set +m
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # the wait was ended by a signal
        wait "$child"
        status=$?
    done
    child=
    case $status in
        0 | 2 | 65 | 130 | 143) exit "$status" ;;
    esac
    if [ "$restarts" -ge "${MAX_RESTARTS:-20}" ]; then
        echo "restart.sh: status $status; given up after $restarts restarts" >&2
        exit "$status"
    fi
    restarts=$((restarts + 1))
    echo "restart.sh: status $status; restart $restarts of ${MAX_RESTARTS:-20}" >&2
    sleep "${PAUSE:-15}"
done

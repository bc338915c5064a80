#!/usr/bin/env bash
# What a pair of processes takes in memory beyond the arena and mapped files, in MiB:
#   scripts/memory.sh [--regions]
# It starts `matkv up` with a store of its own, asks one question, and reads /proc: `private` is
# memory of the process alone, `files` its share of mapped files, `shared` of the arena.
# --regions lists the largest mappings of each process. MATKV names another program.
set -euo pipefail
cd "$(dirname "$0")/.."
matkv=$(realpath "${MATKV:-target/release/matkv}")
work=$(mktemp -d)
up=
stop() {
    if [ -n "$up" ]; then kill -TERM "$up" 2>/dev/null && wait "$up" || true; fi
    rm -rf "$work"
}
trap stop EXIT
export MATKV_PATHS_RUNTIME_DIR=$work/run MATKV_PATHS_STORE_DIR=$work/store
"$matkv" up --set log.level=warn &
up=$!
printf 'The keeper of the north lighthouse carried a brass lamp over the bridge.\n' >"$work/a.txt"
# Neither is there at once: the loader takes documents before it has a decoder.
until_done() {
    until "$matkv" "$@" >"$work/said" 2>&1; do
        kill -0 "$up" 2>/dev/null || { cat "$work/said" >&2; exit 1; }
        sleep 0.2
    done
}
until_done ingest "$work/a.txt"
until_done ask 'What did the keeper carry?'

child() { # of a process, by the beginning of its name
    for pid in $(cat "/proc/$1/task/"*/children); do
        [[ $(cat "/proc/$pid/comm") == $2* ]] && echo "$pid"
    done
}
loader=$(child "$up" matkv-loader)
decoder=$(child "$loader" matkv-decoder)
total=0
printf '%-14s %9s %9s %9s\n' process private files shared
for pid in $loader $decoder; do
    read -r anon file shmem < <(awk '
        /^Pss_Anon/ { a = $2 } /^Pss_File/ { f = $2 } /^Pss_Shmem/ { s = $2 }
        END { print a, f, s }' "/proc/$pid/smaps_rollup")
    printf '%-14s %9d %9d %9d\n' "$(cat "/proc/$pid/comm")" \
        $((anon / 1024)) $((file / 1024)) $((shmem / 1024))
    total=$((total + anon))
done
printf '%-14s %9d\n' both $((total / 1024))
if [ "${1:-}" = --regions ]; then
    for pid in $loader $decoder; do
        echo "$(cat "/proc/$pid/comm"): KiB of Pss, mapping"
        awk '/^[0-9a-f]+-[0-9a-f]+ / { name = $6 == "" ? "anonymous " $1 : $6 }
            /^Pss:/ { print $2, name }' "/proc/$pid/smaps" | sort -rn | head -n 16
    done
fi

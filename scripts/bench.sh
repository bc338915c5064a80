#!/usr/bin/env bash
# Runs a benchmark on the LongBench HotpotQA documents, `paper` on TurboRAG's, `musique` (which is
# `fidelity`) on MuSiQue's:
#   scripts/bench.sh e2e|cold|turns|load|codec|fidelity|musique|throughput|energy|peers|paper DATA_DIRECTORY
# DATA_DIRECTORY holds longbench-hotpotqa/ (turborag/, musique/) or it as .tar.xz. More arguments go
# to `matkv bench`. The process asks for the processor before others do where it may.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
data=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=longbench-hotpotqa
case $kind in
paper) name=turborag ;;
musique) name=musique ;;
esac
if [ -d "$data/$name" ]; then
    corpus=$data/$name
elif [ -f "$data/$name.tar.xz" ]; then
    tar -xJf "$data/$name.tar.xz" -C "$work"
    corpus=$work/$name
else
    echo "skipped: no $name in $data (set DATA=directory)"
    exit 0
fi
# Without a priority of its own, a session's autogroup shares the machine with every other.
if [ -w /proc/self/autogroup ]; then
    echo -20 2>/dev/null >/proc/self/autogroup || true
fi
matkv=${MATKV:-target/release/matkv}
store=${STORE:-target/bench-store}
case $kind in
e2e)
    "$matkv" bench e2e --corpus "$corpus/documents" --documents "${DOCUMENTS:-200}" \
        --questions "$corpus/questions/query.jsonl" --answers "$corpus/answers/answer.jsonl" \
        --count "${COUNT:-20}" --store "$store" "$@"
    ;;
cold | turns)
    # Four of the longest documents are enough for whole 1,024-token chunks.
    mapfile -t longest < <(find "$corpus/documents" -name '*.txt' -size +12k | sort | head -n 6)
    args=()
    for document in "${longest[@]}"; do args+=(--corpus "$document"); done
    "$matkv" bench "$kind" "${args[@]}" "$@"
    ;;
load)
    "$matkv" bench load --corpus "$corpus/documents" --documents "${DOCUMENTS:-80}" \
        --store "$store-exact" "$@"
    ;;
peers)
    "$matkv" bench peers --corpus "$corpus/documents" "$@"
    ;;
paper)
    "$matkv" bench report --paper --corpus "$corpus/documents" --documents "${DOCUMENTS:-200}" \
        --questions "$corpus/questions/query.jsonl" "$@"
    ;;
codec)
    "$matkv" bench codec --corpus "$corpus/documents" --documents "${DOCUMENTS:-80}" \
        --questions "$corpus/questions/query.jsonl" --store "$store-exact" "$@"
    ;;
fidelity | musique)
    if [ "$kind" = musique ]; then
        python3 scripts/musique.py "$corpus/musique_s.json" "$work/corpus"
        corpus=$work/corpus
        store=$store-musique
    fi
    "$matkv" bench fidelity --corpus "$corpus/documents" --documents "${DOCUMENTS:-200}" \
        --questions "$corpus/questions/query.jsonl" --answers "$corpus/answers/answer.jsonl" \
        --count "${COUNT:-20}" --store "$store" "$@"
    ;;
throughput | energy)
    "$matkv" bench "$kind" --corpus "$corpus/documents" --documents "${DOCUMENTS:-200}" \
        --questions "$corpus/questions/query.jsonl" --store "$store" "$@"
    ;;
*)
    echo "usage: scripts/bench.sh e2e|cold|load|codec|fidelity|musique|throughput|energy|peers|paper" \
        "DATA_DIRECTORY" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Records eight requests, each made while the one before is decoded, with and without overlap, and
# draws both: docs/overlap-on.svg and docs/overlap-off.svg. Needs the models (`make demo` once).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d /tmp/matkv-trace.XXXXXX)
up=
trap '[ -z "$up" ] || kill "$up" 2>/dev/null; wait; rm -rf "$work" target/tmp/trace-store' EXIT
mkdir -p target/tmp "$work/docs"
for n in 1 2 3 4 5 6 7 8; do
	# Eight documents of their own, so that every load comes from flash.
	{ echo "Record $n."; head -c 2600 <(cat examples/corpus/*); } >"$work/docs/$n.txt"
done
settings=(--set "paths.runtime_dir=$work/run" --set paths.store_dir=target/tmp/trace-store
	--set chunker.chunk_size=1024 --set log.level=warn)
matkv() {
	target/release/matkv "${settings[@]}" "$@"
}
start() {
	target/release/matkv "${settings[@]}" "$@" up >"$work/up" &
	up=$!
	until grep -q ready "$work/up"; do sleep 0.1; done
}
stop() {
	kill "$up"
	wait "$up" || true
	up=
}
start
matkv ingest "$work/docs" >/dev/null
mapfile -t documents < <(matkv docs ls --format json |
	python3 -c 'import json, sys; [print(d["document_id"]) for d in json.load(sys.stdin)]')
stop
for overlap in true false; do
	start --set "pipeline.overlap=$overlap"
	name=docs/overlap-$([ "$overlap" = true ] && echo on || echo off).svg
	matkv trace --seconds 12 --out "$work/trace.json" --svg "$name" &
	trace=$!
	sleep 0.5
	asks=()
	for document in "${documents[@]}"; do
		# A fixed number of tokens: at this temperature the end does not come.
		matkv ask "What does this record say?" --document "$document" --temperature 50 \
			--seed 1 --max-new-tokens 32 >/dev/null &
		asks+=($!)
		sleep 0.12
	done
	wait "${asks[@]}"
	wait "$trace"
	stop
done

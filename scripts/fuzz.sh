#!/usr/bin/env bash
# Runs every fuzz target of fuzz/ for a while: scripts/fuzz.sh [TARGET]...
# SECONDS_PER_TARGET (30) and SEED (1) may be set. Stops at the first failure and says where the
# input that failed lies and how to run it again. Installs cargo-fuzz where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.13.2
seconds=${SECONDS_PER_TARGET:-30}
seed=${SEED:-1}
# The instrumentation and the address sanitizer are unstable options; the pinned compiler has
# them, and this lets it say so.
export RUSTC_BOOTSTRAP=1
if [ "$(cargo fuzz --version 2>/dev/null)" != "cargo-fuzz $version" ]; then
	echo "installing cargo-fuzz $version"
	cargo install cargo-fuzz --version "$version" --locked --force
fi
mapfile -t targets < <(cargo fuzz list)
if [ $# -gt 0 ]; then targets=("$@"); fi
for target in "${targets[@]}"; do
	cargo fuzz build "$target"
	echo "$target: $seconds seconds, -seed=$seed"
	artifacts=fuzz/artifacts/$target
	mkdir -p "$artifacts"
	log=$artifacts/log
	# An input that takes ten seconds is a failure too.
	if ! cargo fuzz run "$target" -- -seed="$seed" -max_total_time="$seconds" \
		-timeout=10 -print_final_stats=1 >"$log" 2>&1; then
		cat "$log"
		input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
		if [ -z "$input" ]; then
			echo "$target did not run" >&2
			exit 1
		fi
		cat >&2 <<-TEXT
			$target failed with -seed=$seed; the input: $input
			again: RUSTC_BOOTSTRAP=1 cargo fuzz run $target $input
			smaller: RUSTC_BOOTSTRAP=1 cargo fuzz tmin $target $input
		TEXT
		exit 1
	fi
	sed -n 's/^stat::number_of_executed_units: */  inputs: /p' "$log"
done

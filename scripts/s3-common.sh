# What ceph.sh and seaweedfs.sh share: the command line, processes noted in $dir, ports, and the
# gateway's keys. Each calls `main` with its own name; its own functions are `install`, `installed`,
# `make`, `start`, `gateway` and `down`.
# shellcheck shell=bash

# With it, `cd` may go elsewhere.
unset CDPATH

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
	# No log is no reason to keep silent.
	(cd "$dir/log" && tail -n 20 "${@/%/.log}") >&2 || true
	fail "$what; above is the end of what it said, in $dir/log"
}

# Puts into $since when process $1 started, in ticks since boot. Fails if it runs no more. It starts
# no program: Ctrl-C would end that, too, and `spawn` would note nothing.
started() {
	local stat=
	# Read up to its end, which is no success for `read`.
	{ IFS= read -r -d '' stat <"/proc/$1/stat"; } 2>/dev/null || [ -n "$stat" ] || return 1
	# shellcheck disable=SC2086 # Fields, from the third on: the second may hold spaces.
	set -- ${stat##*) }
	# A zombie is over, if it has no thread left but its first.
	[[ $1 != [ZX] || ${18} -gt 1 ]] && since=${20}
}

# Whether process $1 of this peer runs. Pid and start are noted: the pid may be another's by now.
runs() {
	local pid start since
	{ read -r pid start <"$dir/$1.pid"; } 2>/dev/null && started "$pid" && [ "$since" = "$start" ]
}

# Nothing half-started stays: from here to `keep`, $@ is done before this script ends, however it
# ends. The traps stay set meanwhile: a signal that meets bash changing them may end it at once.
undo_with() {
	undo=("$@")
	noting='' caught=''
	trap undone EXIT
	trap 'interrupted HUP' HUP
	trap 'interrupted INT' INT
	trap 'interrupted TERM' TERM
}

keep() { trap - EXIT HUP INT TERM; }

# A second Ctrl-C changes nothing.
interrupted() {
	local before=$noting$caught
	caught=$1
	[ -n "$before" ] || exit 1
}

undone() {
	trap - EXIT
	# What is called meanwhile ignores them, too.
	trap '' HUP INT TERM
	"${undo[@]}"
	# The caller sees the signal.
	[ -z "$caught" ] || {
		trap - "$caught"
		kill -s "$caught" $$
	}
}

# Starts process $1: a session of its own, nothing of the caller's held open. After `undo_with`.
spawn() {
	local name=$1 since=''
	shift
	mkdir -p "$dir/log"
	# Signals wait until the pid is noted: what is not noted is never ended.
	noting=1
	setsid "$@" </dev/null >>"$dir/log/$name.log" 2>&1 9>&- &
	started $! || true
	echo "$! $since" >"$dir/$name.pid" || {
		kill -s KILL $! 2>/dev/null || true
		fail "cannot note $name's pid in $dir"
	}
	noting=''
	[ -z "$caught" ] || exit 1
}

# Starts process $1, which listens on the ports $2, if it does not run.
daemon() {
	local name=$1 ports=$2 port
	shift 2
	! runs "$name" || return 0
	for port in $ports; do
		! listens "$port" || fail "port $port, of $name, is another program's"
	done
	spawn "$name" "$@"
	# Else bash tells of it when it is killed.
	disown $!
}

# Ends process $1: asks, waits $2 seconds, insists. Fails if it runs nevertheless.
end_one() {
	local name=$1 tenths=$(($2 * 10)) pid signal
	if runs "$name"; then
		read -r pid _ <"$dir/$name.pid"
		for signal in TERM KILL; do
			# With what it started itself, once it has a session of its own.
			kill -s "$signal" -- "-$pid" 2>/dev/null || kill -s "$signal" "$pid" 2>/dev/null || true
			for ((; tenths > 0; tenths--)); do
				runs "$name" || break 2
				sleep 0.1
			done
			tenths=100
		done
		! runs "$name" || return 1
	fi
	rm -f "$dir/$name.pid"
}

# Ends processes in this order, each given as NAME or NAME:SECONDS, ten if not given.
end() {
	local process name seconds stuck=()
	for process in "$@"; do
		IFS=: read -r name seconds <<<"$process"
		# One that stays does not keep the others.
		end_one "$name" "${seconds:-10}" || stuck+=("$name")
	done
	for name in "${stuck[@]}"; do
		echo "${0##*/}: $name, process $(cut -d ' ' -f 1 "$dir/$name.pid"), does not end" >&2
	done
	[ ${#stuck[@]} -eq 0 ] || exit 1
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

# Reads DIR, locks it for peer $1 and enters it.
enter() {
	local lock=$1.lock
	[ -n "${2-}" ] || fail "which DIR?"
	if [ "$command" = up ]; then mkdir -p -- "$2"; fi
	[ -d "$2" ] || fail "no directory: $2"
	dir=$(cd -- "$2" && pwd)
	[[ $dir != *[!A-Za-z0-9/._+-]* ]] || fail "letters, digits and /._+- only, please: $dir"
	# What `up` clears away must be its own.
	[ -e "$dir/$lock" ] || [ -z "$(ls -A "$dir")" ] ||
		fail "neither empty nor made by ${0##*/}: $dir"
	exec 9>"$dir/$lock"
	flock -w 180 9 || fail "another ${0##*/} has worked on $dir for three minutes"
	cd "$dir"
}

# Does what the command line after peer $1 asks for.
main() {
	local peer=$1 command=${2-}
	case $command in
	install)
		install
		;;
	up)
		installed
		enter "$peer" "${3-}"
		undo_with down
		if [ ! -e "$dir/made" ]; then
			down
			make
		fi
		start
		printf '%s\n' "endpoint=http://127.0.0.1:$(<"$dir/port")" "access_key=$key" \
			"secret_key=$secret" "bucket=$bucket"
		keep
		;;
	stop-gateway)
		enter "$peer" "${3-}"
		end gateway
		;;
	start-gateway)
		enter "$peer" "${3-}"
		[ -e "$dir/made" ] || fail "nothing to start in $dir: run ${0##*/} up"
		undo_with end gateway
		gateway
		keep
		;;
	down)
		enter "$peer" "${3-}"
		down
		;;
	*)
		sed -n "2,/^set/{s/^# \{0,1\}//p}" "$0" >&2
		exit 2
		;;
	esac
}

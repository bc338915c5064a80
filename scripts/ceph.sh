#!/usr/bin/env bash
# Ceph on loopback, as an S3 peer for the tests: a monitor, an OSD and the gateway (radosgw), no
# manager. Everything lies under DIR, the object store in a sparse file. Only `install` needs root.
#
#   ceph.sh install             Debian's packages, where they are missing
#   ceph.sh up DIR              the last four lines say how to reach it; again: starts what is down
#   ceph.sh stop-gateway DIR    connections are refused from then on
#   ceph.sh start-gateway DIR   on the same port
#   ceph.sh down DIR            nothing of it runs; what was stored stays for the next `up`
#
# MATKV_S3_PORT is the gateway's port at the first `up`; without it a free one is chosen, as are the
# others. MATKV_CEPH_STORE=memstore keeps objects in memory and is ready sooner.
# MATKV_CEPH_GIB is the size of the store, 4 if not given.
set -euo pipefail

# shellcheck source=scripts/s3-common.sh
. "$(dirname "${BASH_SOURCE[0]}")/s3-common.sh"

# These may name another cluster.
unset CEPH_ARGS CEPH_KEYRING

# Runs what ends by itself; `down` ends it, too.
once() {
	spawn once "$@"
	wait $!
}

# Starts process $1, which listens on port $2, if it does not run.
ceph_daemon() { daemon "$@" -f -c "$dir/ceph.conf"; }

mon() { ceph_daemon mon "$(sed -n 's/^mon_host.*:\(.*\)\/0.*/\1/p' ceph.conf)" ceph-mon -i a; }

osd() { ceph_daemon osd '' ceph-osd -i 0; }

gateway() {
	ceph_daemon gateway "$(<port)" radosgw -n client.rgw.matkv
	await gateway 60 serves
}

start() {
	mon
	osd
	gateway
}

down() { end once gateway osd mon; }

# The stores of monitor and OSD, and the user. Only a whole one is used again.
make() {
	local ports name uuid
	export CEPH_CONF=$dir/ceph.conf
	rm -rf "$dir"/{log,mon,osd,rgw,monmap,keyring,ceph.conf,port}
	mkdir -p "$dir"/{log,mon,osd,rgw}
	ports=$(free_ports 2)
	echo "${MATKV_S3_PORT:-$((ports + 1))}" >"$dir/port"
	configuration "$ports" >"$dir/ceph.conf"
	monmaptool --create --clobber --addv a "[v2:127.0.0.1:$ports]" \
		--fsid "$(sed -n 's/^fsid = //p' "$dir/ceph.conf")" "$dir/monmap" >/dev/null
	# Every key from the start, so none has to be asked for.
	ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
	for name in client.admin osd.0 client.rgw.matkv; do
		ceph-authtool "$dir/keyring" --gen-key -n $name --cap mon 'allow *' --cap osd 'allow *' \
			--cap mgr 'allow *' >/dev/null
	done
	once ceph-mon --mkfs -i a --monmap "$dir/monmap" || explain "no monitor" once
	mon
	uuid=$(</proc/sys/kernel/random/uuid)
	await mon 60 once timeout 20 ceph osd new "$uuid" 0
	once ceph-osd -f --mkfs -i 0 --osd-uuid "$uuid" || explain "no OSD" once
	osd
	# Waits for the OSD, too.
	once timeout 90 radosgw-admin -n client.rgw.matkv user create --uid=matkv \
		--display-name=matkv --access-key="$key" --secret-key="$secret" ||
		explain "no S3 user" once osd
	touch "$dir/made"
}

configuration() {
	cat <<-END
		[global]
		fsid = $(</proc/sys/kernel/random/uuid)
		mon_host = [v2:127.0.0.1:$1/0]
		mon_initial_members = a
		public_network = 127.0.0.0/8
		cluster_network = 127.0.0.0/8
		ms_bind_ipv6 = false
		keyring = $dir/keyring
		auth_allow_insecure_global_id_reclaim = false
		run_dir = $dir
		crash_dir = $dir/log
		admin_socket =
		log_to_stderr = true
		log_to_file = false
		err_to_stderr = true
		mon_cluster_log_to_file = false
		debug_rocksdb = 1/1
		# One copy on one OSD.
		osd_pool_default_size = 1
		osd_pool_default_min_size = 1
		osd_pool_default_pg_num = 8
		osd_pool_default_pg_autoscale_mode = off
		osd_crush_chooseleaf_type = 0
		mon_allow_pool_size_one = true
		# A map every 50 ms instead of every second: each new pool waits for some.
		paxos_propose_interval = 0.05
		paxos_min_wait = 0.01
		# Who comes before the OSD is up asks again after this, not after 5 s.
		objecter_tick_interval = 0.5
		[mon]
		mon_data = $dir/mon
		# However full the disk is.
		mon_data_avail_warn = 0
		mon_data_avail_crit = 0
		[osd]
		osd_data = $dir/osd
		osd_objectstore = ${MATKV_CEPH_STORE:-bluestore}
		bluestore_block_size = $((${MATKV_CEPH_GIB:-4} << 30))
		memstore_device_bytes = $((${MATKV_CEPH_GIB:-4} << 30))
		osd_memory_target = 939524096
		# memstore writes its objects down only on a slow one.
		osd_fast_shutdown = $([ "${MATKV_CEPH_STORE-}" = memstore ] && echo false || echo true)
		osd_op_queue = wpq
		[client.rgw.matkv]
		rgw_data = $dir/rgw
		rgw_frontends = beast endpoint=127.0.0.1:$(<"$dir/port")
		rgw_thread_pool_size = 64
		rgw_exit_timeout_secs = 5
		# Works from midnight to six, and then keeps the gateway from ending for 5 s.
		rgw_enable_lc_threads = false
		# What is deleted makes room at once, not after two hours.
		rgw_gc_obj_min_wait = 5
		rgw_gc_processor_period = 5
	END
}

installed() {
	local program
	for program in ceph ceph-mon ceph-osd radosgw radosgw-admin monmaptool curl flock setsid; do
		command -v $program >/dev/null || fail "$program is missing: run ${0##*/} install"
	done
}

install() {
	local missing=() program package
	while read -r program package; do
		command -v "$program" >/dev/null || missing+=("$package")
	done <<-END
		ceph-mon ceph-mon
		ceph-osd ceph-osd
		radosgw radosgw
		monmaptool ceph-base
		ceph ceph-common
		curl curl
	END
	[ ${#missing[@]} -gt 0 ] || return 0
	echo "installing ${missing[*]}"
	packages() {
		${SUDO-} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends "${missing[@]}" >/dev/null
	}
	# The second time with fresh lists: a new machine has none.
	packages || { ${SUDO-} apt-get update -qq && packages; } ||
		fail "missing: apt-get install ${missing[*]} (set SUDO=sudo if that needs it)"
}

main ceph "$@"

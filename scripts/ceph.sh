#!/bin/sh
# A small Ceph on loopback, for tests of what speaks to one: a monitor, a manager and three OSDs in a directory of their own.
#
#   scripts/ceph.sh start DIR    makes and starts it; DIR/ceph.conf is what clients need
#   scripts/ceph.sh osd DIR N    starts OSD N again, after something ended it
#   scripts/ceph.sh stop DIR     ends exactly those, by the numbers in DIR/*.pid; DIR stays
#
# Each OSD has a pool of its own, osd0 to osd2, of one copy: what fails together is a store of its own. The pool rbd lies on all of them.
# MGR=no leaves the manager out, which only figures need. An OSD has 2 GiB, or OSD_BYTES: one that is written to for long ends when they are full. Whoever starts it owns it: no root, no system services.
# Debian: apt install --no-install-recommends ceph-mon ceph-mgr ceph-osd ceph-common
set -eu

usage() {
    sed -n '4,6s/^# *//p' "$0" >&2
    exit 2
}
[ $# -ge 2 ] || usage
verb=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
conf=$dir/ceph.conf

# A command of Ceph's tools, bounded: what does not answer must not hang who asks.
ceph_() { timeout 60 ceph -c "$conf" --connect-timeout 30 "$@"; }

# A port that nobody has just now.
port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# In the foreground of its own session, so that its number is that of the process.
daemon() {
    name=$1
    shift
    setsid "$@" -f -c "$conf" >"$dir/$name.out" 2>&1 </dev/null &
    echo $! >"$dir/$name.pid"
}

start_osd() {
    daemon "osd.$1" ceph-osd -i "$1"
}

start() {
    for tool in ceph-mon ceph-osd ceph-authtool monmaptool ceph python3; do
        command -v $tool >/dev/null || {
            echo "$tool is not there: apt install --no-install-recommends ceph-mon ceph-mgr ceph-osd ceph-common" >&2
            exit 3
        }
    done
    fsid=$(cat /proc/sys/kernel/random/uuid)
    mon=127.0.0.1:$(port)
    cat >"$conf" <<END
[global]
fsid = $fsid
mon_host = v2:$mon
public_addr = 127.0.0.1
keyring = $dir/keyring
run_dir = $dir
admin_socket = $dir/\$name.asok
pid_file =
log_file = $dir/\$name.log
mon_cluster_log_file = $dir/cluster.log
ms_bind_ipv6 = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
mon_allow_pool_size_one = true
mon_allow_pool_delete = true
# An OSD that hangs is not marked down: the hard case, and as it is for OSDs of one host anyhow. One that has ended is, at once.
osd_heartbeat_grace = 600
mon_osd_report_timeout = 900
# Its files share a disk with everything else of this machine.
mon_data_avail_crit = 1
mon_data_avail_warn = 1
[client]
log_file = /dev/null
admin_socket =
[mon]
mon_data = $dir/mon
[mgr]
mgr_data = $dir/mgr
mgr_initial_modules =
[osd]
osd_data = $dir/osd.\$id
osd_objectstore = bluestore
bluestore_block_size = ${OSD_BYTES:-2147483648}
bluestore_block_db_create = false
bluestore_block_wal_create = false
bluestore_prefer_deferred_size = 0
osd_memory_target = 939524096
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
END
    ceph-authtool -C "$dir/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
    ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' >/dev/null
    ceph-authtool "$dir/keyring" --gen-key -n mgr.x --cap mon 'allow profile mgr' --cap osd 'allow *' >/dev/null
    for n in 0 1 2; do
        ceph-authtool "$dir/keyring" --gen-key -n osd.$n --cap mon 'allow profile osd' --cap osd 'allow *' >/dev/null
    done
    monmaptool --create --fsid "$fsid" --addv a "[v2:$mon]" "$dir/monmap" >/dev/null
    mkdir -p "$dir/mon" "$dir/mgr"
    ceph-mon -c "$conf" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
    daemon mon.a ceph-mon -i a
    # The monitor knows its own and the administrator's key from its making; the rest are told.
    ceph_ auth import -i "$dir/keyring"
    for n in 0 1 2; do
        mkdir -p "$dir/osd.$n"
        uuid=$(cat /proc/sys/kernel/random/uuid)
        ceph_ osd new "$uuid" >/dev/null
        ceph-osd -c "$conf" -i $n --mkfs --osd-uuid "$uuid" >"$dir/osd.$n.out" 2>&1
        ceph_ osd crush add osd.$n 1 root=default host=h$n >/dev/null 2>&1
        ceph_ osd crush set-device-class c$n osd.$n >/dev/null 2>&1
        start_osd $n
    done
    [ "${MGR:-yes}" = no ] || daemon mgr.x ceph-mgr -i x
    for n in 0 1 2; do
        ceph_ osd crush rule create-replicated only$n default osd c$n >/dev/null 2>&1
        ceph_ osd pool create osd$n 8 8 replicated only$n >/dev/null 2>&1
    done
    ceph_ osd pool create rbd 8 >/dev/null 2>&1
    ceph_ osd pool application enable rbd rbd >/dev/null 2>&1
    for try in $(seq 120); do
        up=$(ceph_ osd stat -f json 2>/dev/null | sed -n 's/.*"num_up_osds": *\([0-9]*\).*/\1/p')
        [ "${up:-0}" = 3 ] && break
        sleep 0.5
    done
    [ "${up:-0}" = 3 ] || {
        echo "only ${up:-0} of 3 OSDs came up: see $dir/osd.*.out and $dir/osd.*.log" >&2
        exit 1
    }
    # Placement groups take a moment: the first object of each pool says when.
    for pool in osd0 osd1 osd2 rbd; do
        timeout 60 rados -c "$conf" -p $pool put .ready "$dir/monmap"
        timeout 60 rados -c "$conf" -p $pool rm .ready
    done
    echo "$conf"
}

stop() {
    for file in "$dir"/osd.*.pid "$dir"/mgr.*.pid "$dir"/mon.*.pid; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        # A number may be another's by now: only what was started with this configuration is ended.
        if { tr '\0' '\n' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -qxF "$conf"; then
            kill -CONT "$pid" 2>/dev/null || true
            kill -KILL "$pid" 2>/dev/null || true
        fi
        rm -f "$file"
    done
}

case $verb in
start) start ;;
osd) [ $# = 3 ] || usage; start_osd "$3" ;;
stop) stop ;;
*) usage ;;
esac

#!/bin/bash
# What the guests of ../ublk.sh do: `corbel ublk` as people use it. Each test says `guest: ok NAME`, or `guest: FAILED` and why.
set -u
corbel=/tmp/suite/corbel
cd /tmp || exit 1
wanted() { [ "$tests" = all ] || [[ " $tests " == *" $1 "* ]]; }
ok() { echo "guest: ok $*"; }
failed() {
    echo "guest: FAILED $*"
    [ ! -e out ] || sed 's/^/    /' out
    [ ! -e log ] || tail -n 5 log | sed 's/^/    /'
    dmesg | tail -n 5 | sed 's/^/    /'
}
# until_true SECONDS COMMAND...
until_true() {
    local n=$(($1 * 10))
    shift
    until "$@"; do
        n=$((n - 1))
        [ $n -gt 0 ] || return 1
        sleep 0.1
    done
}
# serve ARGS...: a server in the background, when its device is there; `server` is its process, `said` what it said
serve() {
    : >said
    "$corbel" ublk --json "$@" >said 2>>log &
    server=$!
    until_true 60 has_said || { cat said >out; return 1; }
    device=$(field device)
    id=$(field id)
    [ -b "$device" ]
}
has_said() { [ -s said ] || ! kill -0 $server 2>/dev/null; }
field() { sed -n "s/.*\"$1\":\"\\?\\([^\",}]*\\).*/\\1/p" said | head -n 1; }
# end: the server ends when it is asked to, and its device goes
end() {
    kill -TERM $server
    wait $server && [ ! -e "/sys/block/ublkb$id" ] && [ ! -e "/dev/ublkc$id" ]
}
# crash: it does not
crash() {
    kill -KILL $server
    wait $server 2>/dev/null
    true
}
# load ARGS...: fio, which verifies what it wrote
load() {
    fio --name=load --filename="$device" --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bsrange=512-128k --blockalign=512 \
        --verify=crc32c --verify_fatal=1 --verify_backlog=64 --size=24m --fsync=50 --allow_file_create=0 "$@" >out 2>&1
}
# crashes COUNT SERVE-ARGS...: fio verifies while its server is killed and started again; it sees nothing of that
crashes() {
    local count=$1 first=$id n
    shift
    load --time_based --runtime=$((count * 8 + 6)) &
    local fio=$!
    for n in $(seq "$count"); do
        sleep 4
        kill -0 $fio 2>/dev/null || { failed "fio ended early"; return 1; }
        crash
        [ "$(cat /sys/block/ublkb"$id"/size)" -gt 0 ] || { failed "the device is gone"; return 1; }
        # At once, and after a while.
        [ $((n % 2)) = 1 ] || sleep 1
        serve "$@" || { failed "it does not come back"; return 1; }
        [ "$(field recovered)" = true ] && [ "$id" = "$first" ] || { cp said out; failed "not taken over"; return 1; }
    done
    wait $fio
}

# made FS DEVICE-OR-FILE: (small ones of XFS are for tests only)
made() {
    case $1 in
    ext4) mkfs.ext4 -q -F "$2" ;;
    xfs) TEST_DIR=1 TEST_DEV=1 QA_CHECK_FS=1 mkfs.xfs -q -f -l size=8m "$2" ;;
    esac >out 2>&1
}
# checked FS DEVICE
checked() {
    case $1 in ext4) e2fsck -fn "$2" ;; xfs) xfs_repair -n "$2" ;; esac >out 2>&1
}
power() { /usr/bin/python3 /tmp/suite/power.py "$@"; }

if wanted driver; then
    "$corbel" ublk memory:1MiB >out 2>&1
    [ $? = 7 ] && grep -q "modprobe ublk_drv" out && ok "no driver is told" || failed "no driver"
fi
/tmp/suite/busybox insmod /tmp/suite/ublk_drv.ko || failed insmod
if wanted driver; then
    setpriv --reuid 65534 --regid 65534 --clear-groups "$corbel" ublk memory:1MiB >out 2>&1
    [ $? = 7 ] && grep -q "run as root" out && ok "no right is told" || failed "no right"
fi

if wanted memory; then
    if serve memory:64MiB --queues 2 --depth 32; then
        queue=/sys/block/ublkb$id/queue
        [ "$(cat $queue/logical_block_size) $(cat $queue/write_cache) $(cat $queue/fua)" = "512 write back 1" ] &&
            [ "$(cat /sys/block/ublkb"$id"/size)" = 131072 ] && [ "$(cat $queue/discard_max_bytes)" != 0 ] &&
            ok "memory: what the disk is like" || failed "memory: what the disk is like"
        load --numjobs=2 --offset_increment=30m && ok "memory: fio verifies" || failed "memory: fio"
        blkdiscard "$device" && cmp -n 67108864 "$device" /dev/zero && ok "memory: discarded" || failed "memory: blkdiscard"
        "$corbel" ublk --json list >out 2>&1 && grep -q '"source":"memory:64MiB"' out && ok "list for programs" || failed "list --json"
        "$corbel" ublk list >out 2>&1 && grep -q "$device *live *64MiB .*memory:64MiB" out && ok "list" || failed "list"
        "$corbel" ublk delete "$id" --json >out 2>&1 && wait $server && [ ! -e "$device" ] && ok "deleted from outside" || failed "delete"
        "$corbel" ublk delete "$id" --json >out 2>&1
        [ $? = 1 ] && grep -q "no such device" out && ok "deleted once" || failed "deleted twice"
    else
        failed "memory: does not start"
    fi
    if serve memory:8MiB --id 5 && [ "$device" = /dev/ublkb5 ]; then
        crash
        until_true 30 test ! -e /sys/block/ublkb5 && ok "memory goes with its server" || failed "memory: stays"
        "$corbel" ublk --recover 5 --json >out 2>&1
        [ $? = 1 ] && grep -q "gone with it" out && ok "memory is not taken over" || failed "memory: taken over"
        "$corbel" ublk delete 5 >out 2>&1 && ok "a dead device is removed" || failed "a dead device"
    else
        failed "memory: no number 5"
    fi
fi

if wanted filesystems || wanted power || wanted nbd; then
    while read -r name; do /tmp/suite/busybox insmod "/tmp/suite/modules/$name.ko" || failed "insmod $name"; done </tmp/suite/modules/list
fi
for part in filesystems power nbd; do
    # shellcheck source=/dev/null
    . /tmp/suite/$part.sh
done

# disk NAME ARGS...: a disk of a source, through its life
disk() {
    local name=$1
    shift
    serve "$@" || { failed "$name: does not start"; return; }
    echo "    $name: $(cat said)"
    local first=$id
    load && ok "$name: fio verifies" || failed "$name: fio"
    blkdiscard -z -o 1048576 -l 1048576 "$device" && cmp -n 1048576 -i 1048576:0 "$device" /dev/zero && ok "$name: zeroes" || failed "$name: zeroes"
    "$corbel" ublk --json "$@" >out 2>&1
    [ $? = 1 ] && grep -q "served already" out && ok "$name: served once" || failed "$name: served twice"
    mkfs.ext4 -q "$device" >out 2>&1 && mount -o discard "$device" /mnt || { failed "$name: mkfs and mount"; return; }
    tar -C /usr/share -cf - --exclude=doc zoneinfo | tar -C /mnt -xf - && (cd /usr/share && find zoneinfo -type f -exec md5sum {} +) >sums
    "$corbel" ublk delete "$first" >out 2>&1
    [ $? = 1 ] && grep -q "in use" out && ok "$name: in use stays" || failed "$name: deleted in use"
    sync
    crash
    "$corbel" ublk delete "$first" >out 2>&1
    [ $? = 1 ] && grep -q "in use" out && ok "$name: in use stays without a server" || failed "$name: deleted in use without a server"
    # What reads waits, and goes on.
    echo 3 >/proc/sys/vm/drop_caches
    (cd /mnt && md5sum --quiet -c /tmp/sums >/tmp/compared 2>&1) &
    local reader=$!
    sleep 2
    kill -0 $reader 2>/dev/null || failed "$name: who reads does not wait"
    if ! serve --recover "$id" || [ "$(field recovered)" != true ]; then
        failed "$name: --recover"
        # Else what waits for it waits for ever.
        "$corbel" ublk delete --force "$first" >/dev/null
        umount /mnt
        return
    fi
    wait $reader && ok "$name: files are there after a crash" || { cp compared out; failed "$name: files"; }
    umount /mnt && e2fsck -fn "$device" >out 2>&1 && ok "$name: e2fsck" || failed "$name: e2fsck"
    crashes 2 "$@" && ok "$name: fio verifies through two crashes" || failed "$name: fio through crashes"
    dd if="$device" bs=1M 2>/dev/null | md5sum >before
    end && ok "$name: ends" || failed "$name: does not end"
    serve "$@" || failed "$name: does not start again"
    dd if="$device" bs=1M 2>/dev/null | md5sum | cmp - before && ok "$name: is the same afterwards" || failed "$name: is not the same"
    end || failed "$name: does not end"
}

if wanted file; then
    disk file file:/tmp/disk.img --size 96MiB
    serve file:/tmp/disk.img --read-only || failed "file: read only"
    dd if=/dev/zero of="$device" bs=4096 count=1 oflag=direct 2>out && failed "a read-only disk is written" || ok "read only"
    dd if="$device" bs=1M 2>/dev/null | cmp - /tmp/disk.img && ok "file: what is read" || failed "file: what is read"
    end || failed "read only: does not end"
    # What was served is gone: nothing is made in its place, under a disk that somebody may use.
    serve file:/tmp/disk.img --size 96MiB || failed "file: does not start"
    crash
    mv disk.img moved.img
    "$corbel" ublk file:/tmp/disk.img --size 96MiB --json >out 2>&1
    [ $? != 0 ] && [ ! -e disk.img ] && ok "file: is not made anew under its disk" || failed "file: made anew"
    mv moved.img disk.img
    serve file:/tmp/disk.img --size 96MiB && [ "$(field recovered)" = true ] && end && ok "file: is taken over when it is back" || failed "file: back"
    disk "file, copied" file:/tmp/disk.img --copy
    disk "file, cached" file:/tmp/disk.img --cache 4MiB
    # What was answered and is in the cache alone would be lost unseen: the disk goes with its server, and whoever uses it gets errors.
    serve file:/tmp/disk.img --cache 4MiB --write-back || failed "write-back: does not start"
    load && ok "write-back: fio verifies" || failed "write-back: fio"
    crash
    until_true 30 test ! -e "/sys/block/ublkb$id" && ok "write-back: goes with its server" || failed "write-back: stays"
    serve file:/tmp/disk.img || failed "write-back: does not start again"
    [ "$(field recovered)" = false ] && ok "write-back: is made anew" || failed "write-back: is taken over"
    crash
    "$corbel" ublk file:/tmp/disk.img --cache 4MiB --write-back --json >out 2>&1
    [ $? = 1 ] && grep -q "without --write-back" out && ok "write-back: does not take over" || failed "write-back: takes over"
    "$corbel" ublk delete "$id" >out 2>&1 && ok "a device without a server is removed" || failed "a device without a server"
    rm -f disk.img
fi

if wanted volume; then
    if "$corbel" cluster up --nodes 3 --dir /tmp/cluster --capacity 160MiB --no-mount >out 2>&1; then
        disk volume volume:/disk.img --size 64MiB --set node.socket=/tmp/cluster/n1/run/hostd.sock
        # A flush means all replicas: another node has it when the first one is gone.
        serve volume:/disk.img --set node.socket=/tmp/cluster/n1/run/hostd.sock || failed "volume: does not start"
        head -c 1048576 /dev/urandom >random
        dd if=random of="$device" bs=64k oflag=direct conv=fsync 2>out || failed "volume: dd"
        "$corbel" cluster kill 1 --dir /tmp/cluster >out 2>&1 || failed "volume: kill"
        crash
        "$corbel" ublk delete "$id" >out 2>&1 || failed "volume: delete"
        serve volume:/disk.img --read-only --set node.socket=/tmp/cluster/n2/run/hostd.sock || failed "volume: node 2"
        cmp -n 1048576 "$device" random && ok "volume: a flush means all replicas" || failed "volume: lost"
        end || failed "volume: does not end"
        "$corbel" cluster down --dir /tmp/cluster >out 2>&1
    else
        failed "cluster up"
    fi
fi
dmesg | grep -E "BUG|WARNING|Oops|I/O error|blocked for more" | sed 's/^/    /' | head -n 20

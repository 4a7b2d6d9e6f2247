#!/bin/bash
# Section `nbd` of tests.sh: the kernel's NBD client at `corbel nbd`, by nbd-client(8), and by nbd.py where connections shall be exchanged.

# offer ARGS...: `corbel nbd` with an export `disk`, on a Unix socket
offer() {
    : >said
    # (Who was killed has left its socket behind.)
    "$corbel" nbd --json --listen unix:/tmp/nbd.sock --export "disk=$1" "${@:2}" >said 2>>log &
    server=$!
    until_true 60 has_said
    [ -s said ] && kill -0 $server
}
withdraw() { kill -TERM $server && wait $server; }
# sized BYTES: the disk of the kernel has that size
sized() { [ "$(cat /sys/block/nbd0/size)" = $(($1 / 512)) ]; }

# nbd_disk NAME SOURCE ARGS...: by nbd-client with four connections
nbd_disk() {
    local name="nbd, $1"
    shift
    offer "$@" || { cp said out; failed "$name: does not start"; return; }
    device=/dev/nbd0
    nbd-client -unix /tmp/nbd.sock $device -N disk -C 4 >out 2>&1 && until_true 20 sized $((96 << 20)) || { failed "$name: nbd-client"; withdraw; return; }
    local queue=/sys/block/nbd0/queue
    [ "$(cat $queue/write_cache)" = "write back" ] && [ "$(cat $queue/discard_max_bytes)" != 0 ] && ok "$name: what the disk is like" ||
        { tail $queue/write_cache $queue/fua $queue/discard_max_bytes >out; failed "$name: what the disk is like"; }
    load && ok "$name: fio verifies" || failed "$name: fio"
    load --numjobs=3 --offset_increment=30m --size=20m && ok "$name: fio verifies from three" || failed "$name: fio from three"
    blkdiscard $device && cmp -n $((96 << 20)) $device /dev/zero >out 2>&1 && ok "$name: trimmed" || failed "$name: trimmed"
    made ext4 $device && mount -o discard $device /mnt || { failed "$name: mkfs and mount"; nbd-client -d $device; withdraw; return; }
    fsx_runs 3 1500 && ok "$name: fsx" || { tail -n 20 fsx-said >out; failed "$name: fsx"; }
    tar -C /usr/share -cf - zoneinfo | tar -C /mnt -xf - && (cd /mnt && find zoneinfo -type f -exec md5sum {} +) >sums
    umount /mnt && nbd-client -d $device >out 2>&1 || failed "$name: disconnects"
    # What it has is another client's, and another connection's.
    until_true 20 sized 0 && nbd-client -unix /tmp/nbd.sock $device -N disk >out 2>&1 && until_true 20 sized $((96 << 20)) && mount $device /mnt &&
        (cd /mnt && md5sum --quiet -c /tmp/sums) >out 2>&1 && umount /mnt && checked ext4 $device && ok "$name: files are the same afterwards" || failed "$name: files"
    nbd-client -d $device >out 2>&1
    until_true 20 sized 0 || failed "$name: stays"
    withdraw && ok "$name: ends" || failed "$name: does not end"
}

# exchange: connections are exchanged while fio verifies and a file system is mounted: nobody gets an error
exchange() {
    local n
    offer "$@" && device=/dev/nbd0 && nbd 'connect' 0 /tmp/nbd.sock disk 2 >out 2>&1 || { failed "nbd, killed: does not start"; return; }
    made ext4 $device && mount $device /mnt && fsx_runs 4 100 || failed "nbd, killed: mkfs and mount"
    fio_runs 14 &
    local fio=$!
    for n in 1 2; do
        sleep 4
        forget
        kill -KILL $server
        wait $server 2>/dev/null
        offer "$@" && nbd again 0 /tmp/nbd.sock disk 2 >out 2>&1 || failed "nbd, killed: does not come back"
    done
    wait $fio && ok "nbd, killed: fio verifies through two crashes" || { cp fio-said out; failed "nbd, killed: fio"; }
    # It has grown: who connects is told so, and the file system takes it.
    truncate -s 128M disk.img
    nbd again 0 /tmp/nbd.sock disk 1 >out 2>&1
    grep -q $((128 << 20)) out && until_true 20 sized $((128 << 20)) && resize2fs $device >out 2>&1 && [ "$(df --output=size -m /mnt | tail -n 1)" -gt 100 ] &&
        ok "nbd: a disk that has grown" || failed "nbd: a disk that has grown"
    (cd /mnt && find . -type f -exec md5sum {} +) >sums
    umount /mnt && checked ext4 $device && ok "nbd, killed: is whole" || failed "nbd, killed: is not whole"
    mount $device /mnt && (cd /mnt && md5sum --quiet -c /tmp/sums) >out 2>&1 && umount /mnt || failed "nbd, killed: files"
    nbd disconnect 0 && until_true 20 sized 0 && withdraw || failed "nbd, killed: does not end"
}
nbd() { /usr/bin/python3 /tmp/suite/nbd.py "$@"; }

# anew: a server that is killed takes its write-back cache with it, who uses the disk gets errors, and who connects anew finds what was flushed
anew() {
    offer "$@" && device=/dev/nbd0 && nbd-client -unix /tmp/nbd.sock $device -N disk >out 2>&1 && until_true 20 sized $((96 << 20)) || failed "nbd, anew: does not start"
    head -c 4194304 /dev/urandom >random
    dd if=random of=$device bs=64k oflag=direct conv=fsync 2>out || failed "nbd, anew: dd"
    kill -KILL $server
    wait $server 2>/dev/null
    dd if=$device of=/dev/null bs=4k count=1 iflag=direct 2>out && failed "nbd, anew: a dead server is read"
    nbd-client -d $device >out 2>&1
    until_true 20 sized 0 || failed "nbd, anew: stays"
    offer "$@" && nbd-client -unix /tmp/nbd.sock $device -N disk >out 2>&1 && until_true 20 sized $((96 << 20)) && cmp -n 4194304 $device random >out 2>&1 &&
        ok "nbd, anew: what was flushed is there" || failed "nbd, anew: lost"
    nbd-client -d $device >out 2>&1
    until_true 20 sized 0 && withdraw || failed "nbd, anew: does not end"
}

if wanted nbd; then
    for n in 1 2 3; do mkdir -p /tmp/stores/$n; done
    nbd_disk file file:/tmp/disk.img --size 96MiB
    nbd_disk "file, write-back" file:/tmp/disk.img --cache 4MiB --write-back
    rm -f nbd.pool
    "$corbel" pool create nbd.pool --coding rs:2,1 --store a=dir:/tmp/stores/1 --store b=dir:/tmp/stores/2 --store c=dir:/tmp/stores/3 >out 2>&1 &&
        "$corbel" pool image nbd.pool nbd --size 96MiB --object-size 1MiB >out 2>&1 || failed "nbd: no pool"
    nbd_disk pool pool:/tmp/nbd.pool:nbd --cache 8MiB
    rm -rf /tmp/stores/?/nbd
    exchange file:/tmp/disk.img --size 96MiB --cache 4MiB
    truncate -s 96M disk.img
    anew file:/tmp/disk.img --size 96MiB --cache 16MiB --write-back
    rm -f disk.img
fi

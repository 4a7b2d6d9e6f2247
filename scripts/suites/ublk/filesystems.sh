#!/bin/bash
# Section `filesystems` of tests.sh: ext4 and XFS on disks of ours, under fsx and fio, while servers are killed.

# fsx_runs SEED: every operation that it knows, mapping included
fsx_runs() (
    mkdir -p /mnt/fsx && cd /mnt/fsx && RUST_BACKTRACE=0 /tmp/suite/fsx -f /tmp/suite/fsx.toml -S "$1" -N "$2" -P /tmp "fsx-$1" >/tmp/fsx-said 2>&1
)
# fio_runs SECONDS: two jobs, one past the page cache and one in it
fio_runs() {
    mkdir -p /mnt/fio && fio --directory=/mnt/fio --rw=randwrite --bsrange=512-64k --blockalign=512 --size=8m --verify=crc32c --verify_fatal=1 \
        --verify_backlog=64 --fsync=40 --time_based --runtime="$1" --group_reporting --name=direct --direct=1 --ioengine=libaio --iodepth=8 \
        --name=cached --direct=0 --ioengine=psync >/tmp/fio-said 2>&1
}
# cached pages are none: what is read then is the disk's
forget() { echo 3 >/proc/sys/vm/drop_caches; }

# file_system FS NAME SERVE-ARGS...: filled, while its server is killed; what is there afterwards is the same, and whole
file_system() {
    local fs=$1 name="$1, $2" n first fsx fio
    shift 2
    serve "$@" && made "$fs" "$device" && mount -o discard "$device" /mnt || { failed "$name: mkfs and mount"; return; }
    first=$id
    fsx_runs 1 2000 &
    fsx=$!
    fio_runs 14 &
    fio=$!
    for n in 1 2; do
        sleep 4
        forget
        crash
        serve "$@" && [ "$(field recovered)" = true ] && [ "$id" = "$first" ] ||
            { cp said out; failed "$name: not taken over"; "$corbel" ublk delete --force "$first" >/dev/null; umount /mnt; return; }
    done
    wait $fio && ok "$name: fio verifies through two crashes" || { cp fio-said out; failed "$name: fio"; }
    wait $fsx && ok "$name: fsx through two crashes" || { tail -n 20 fsx-said >out; failed "$name: fsx"; }
    cp -r /etc/apt /mnt/fio/ && fstrim /mnt && (cd /mnt && find . -type f -exec md5sum {} +) >sums
    umount /mnt || failed "$name: umount"
    end || failed "$name: does not end"
    serve "$@" && mount "$device" /mnt && forget && (cd /mnt && md5sum --quiet -c /tmp/sums) >out 2>&1 && umount /mnt &&
        ok "$name: files are the same afterwards" || failed "$name: files"
    checked "$fs" "$device" && ok "$name: is whole" || failed "$name: is not whole"
    end || failed "$name: does not end"
}

written() { [ "$(find /mnt/files -type f -name '[0-9]*' | wc -l)" -ge "$1" ]; }

# cache_lost FS SERVE-ARGS...: what was not flushed is lost with its server, as by a power cut, and what was synced is there
cache_lost() {
    local fs=$1 name="$1, write-back" n mark wrong=0 writer
    shift
    serve "$@" && made "$fs" "$device" && end || { failed "$name: mkfs"; return; }
    for n in 1 2 3; do
        serve "$@" && mount "$device" /mnt && rm -rf /mnt/files && mkdir /mnt/files && sync -f /mnt || { failed "$name: mount"; return; }
        power files /mnt/files --seed "$n" --seconds 90 --may-fail >marks 2>wrote &
        writer=$!
        # (However slow the guest is.)
        until_true 60 written $((10 + n * 10)) || { failed "$name: nearly nothing is written"; wrong=1; }
        crash
        wait $writer
        mark=$(cat marks)
        umount /mnt || umount -l /mnt
        until_true 30 test ! -e "/sys/block/ublkb$id" || failed "$name: the disk stays"
        serve "$@" && mount "$device" /mnt && power look /mnt/files "$mark" "$n" >out 2>&1 && umount /mnt && checked "$fs" "$device" ||
            { failed "$name: crash $n, $mark synced"; wrong=1; umount /mnt 2>/dev/null; }
        echo "    $name: $mark synced before crash $n"
        end || failed "$name: does not end"
    done
    [ $wrong = 0 ] && ok "$name: what was synced is there after three crashes" || failed "$name: lost"
}

if wanted filesystems; then
    for n in 1 2 3; do mkdir -p /tmp/stores/$n; done
    for fs in ext4 xfs; do
        rm -f disk.img
        file_system $fs file file:/tmp/disk.img --size 96MiB
        file_system $fs "file, cached" file:/tmp/disk.img --cache 4MiB
        cache_lost $fs file:/tmp/disk.img --cache 4MiB --write-back
        rm -f fs.pool
        "$corbel" pool create fs.pool --coding rs:2,1 --store a=dir:/tmp/stores/1 --store b=dir:/tmp/stores/2 --store c=dir:/tmp/stores/3 >out 2>&1 &&
            "$corbel" pool image fs.pool $fs --size 96MiB --object-size 1MiB >out 2>&1 || failed "$fs: no pool"
        file_system $fs pool pool:/tmp/fs.pool:$fs --cache 8MiB
        rm -rf /tmp/stores/?/$fs
    done
    rm -f disk.img
fi

#!/bin/bash
# Section `power` of tests.sh: power cuts, above our disk and below it, from what dm-log-writes has recorded (power.py).
export DM_DISABLE_UDEV=1

# record DEVICE-OR-FILE: /dev/mapper/log, over what is there now; that is kept in base.img if it is a file
record() {
    rm -f log.img base.img
    truncate -s 2G log.img
    below=$1 looped=
    if [ -f "$below" ]; then
        cp --sparse=always "$below" base.img
        below=$(losetup -f --show "$below") && looped=$below || return 1
    fi
    journal=$(losetup -f --show log.img) && dmsetup create log --table "0 $(blockdev --getsz "$below") log-writes $below $journal" >out 2>&1
}
# recorded: its end
recorded() {
    until_true 20 dmsetup remove log >out 2>&1 && losetup -d "$journal" && { [ -z "$looped" ] || losetup -d "$looped"; } || failed "the log does not end"
}

# below NAME SERVE-ARGS...: a disk of ours over the log is written to, and judged sector by sector. What to do meanwhile is in `meanwhile`, what is
# to be seen in `expect`.
meanwhile=true expect=kept count=120
below() {
    local name=$1
    shift
    rm -f data.img && truncate -s 16M data.img && record data.img || { failed "$name: no log"; return; }
    if serve file:/dev/mapper/log "$@"; then
        seed=$((seed + 1))
        power raw "$device" expected --seed $seed --seconds 30 --count "$count" --log log >wrote 2>&1 &
        local writer=$!
        $meanwhile "$@"
        wait $writer || { cp wrote out; failed "$name: the writer (seed $seed)"; }
        end || failed "$name: does not end"
        recorded
        cat wrote | sed "s/^/    $name, seed $seed: /"
        if [ $expect = lost ]; then
            power judge log.img expected >out 2>&1
            [ $? = 1 ] && grep -q "and was flushed with" out && ok "$name: is found" || failed "$name: is not found"
            return
        fi
        power judge log.img expected >out 2>&1 && ok "$name: what was flushed is there ($(head -n 1 out))" || failed "$name: lost (seed $seed)"
        [ $expect = both ] || return
        # The judge itself: of each fourth flush nothing reached the disk.
        power judge log.img expected --forget 4 >out 2>&1
        [ $? = 1 ] && grep -q "and was flushed with" out && ok "$name: a lost flush is found" || failed "$name: a lost flush is not found"
    else
        failed "$name: does not start"
        recorded
    fi
}
# The disk says that it has no cache: then nobody above asks for flushes.
lie() { echo "write through" >"/sys/block/ublkb$id/queue/write_cache"; }
# Its server is killed twice.
kills() {
    local n
    for n in 1 2; do
        sleep 1.5
        kill -0 $writer || failed "killed: too late"
        crash
        serve file:/dev/mapper/log "$@" && [ "$(field recovered)" = true ] || failed "killed: is not taken over"
    done
}

# replay FS NAME COUNT COMMAND...: power cuts of the log, each on a file system of its own, in `cut`; then COMMAND MARK
replay() {
    local fs=$1 name=$2 count=$3 point mark good=0 cuts=0
    shift 3
    for point in $(power points log.img "$count" $seed); do
        cp --sparse=always base.img cut.img
        mark=$(power cut log.img cut.img "$point" $((seed * 1000 + point)) 2>out) || { failed "$name: cut at $point"; continue; }
        cuts=$((cuts + 1))
        "$@" "$mark" && good=$((good + 1)) || failed "$name: cut at $point (mark $mark, seed $seed)"
    done
    [ $cuts -gt 0 ] && [ $good = $cuts ] && ok "$name: $good power cuts" || failed "$name: $good of $cuts power cuts"
}
# lies NAME COUNT COMMAND...: the same of a disk that lies: of each second flush nothing reached it. Then something is lost, or cannot be
# mounted, at most moments.
lies() {
    local name=$1 count=$2 point mark lost=0
    shift 2
    for point in $(power points log.img "$count" $seed); do
        cp --sparse=always base.img cut.img
        mark=$(power cut log.img cut.img "$point" "$point" --forget 2)
        "$@" "$mark" || lost=$((lost + 1))
    done
    [ $lost != 0 ] && ok "$name: lost flushes are found ($lost of $count)" || failed "$name: lost flushes are not found"
}
# files_there FS DEVICE MARK
files_there() {
    local fs=$1 disk=$2
    mount "$disk" /mnt >out 2>&1 || return 1
    power look /mnt/files "$3" $seed >out 2>&1
    local code=$?
    umount /mnt
    [ $code = 0 ] && checked "$fs" "$disk"
}
# in_loop FS MARK: the same, of cut.img
in_loop() {
    local loop code
    loop=$(losetup -f --show cut.img) && files_there "$1" "$loop" "$2"
    code=$?
    losetup -d "$loop"
    return $code
}
# write_files COUNT
write_files() {
    mkdir /mnt/files && sync -f /mnt && power files /mnt/files --seed $seed --seconds 30 --count "$1" --quiet --log log >wrote 2>&1 &&
        echo "    $name, seed $seed: $(cat wrote) synced"
}

# files_below FS NAME SERVE-ARGS...: a file system on a disk of ours, over the log
files_below() {
    local fs=$1 name="$1, $2"
    shift 2
    seed=$((seed + 1))
    rm -f data.img && truncate -s 96M data.img && made "$fs" data.img && record data.img || { failed "$name: no log"; return; }
    serve file:/dev/mapper/log "$@" && mount "$device" /mnt && write_files 100 && umount /mnt && end || failed "$name: does not write"
    recorded
    replay "$fs" "$name" 9 in_loop "$fs"
    lies "$name" 3 in_loop "$fs"
}

# files_above FS SERVE-ARGS...: a file system on the log, over a disk of ours; and what is left of it on another one
files_above() {
    local fs=$1 name="$1, above"
    shift
    seed=$((seed + 1))
    rm -f data.img && truncate -s 96M data.img && made "$fs" data.img && cp --sparse=always data.img before.img
    serve file:/tmp/data.img "$@" && record "$device" || { failed "$name: no log"; return; }
    mount /dev/mapper/log /mnt && write_files 60 && umount /mnt || failed "$name: does not write"
    recorded
    end || failed "$name: does not end"
    mv before.img base.img
    replay_over "$fs" "$name" 3 "$@"
}
replay_over() {
    local fs=$1 name=$2 count=$3 point mark good=0 cuts=0
    shift 3
    for point in $(power points log.img "$count" $seed); do
        cuts=$((cuts + 1))
        cp --sparse=always base.img cut.img
        serve file:/tmp/cut.img "$@" && mark=$(power cut log.img "$device" "$point" $((seed * 1000 + point)) 2>out) &&
            files_there "$fs" "$device" "$mark" && end && good=$((good + 1)) || { failed "$name: cut at $point (seed $seed)"; end; }
    done
    [ $cuts -gt 0 ] && [ $good = $cuts ] && ok "$name: $good power cuts" || failed "$name: $good of $cuts power cuts"
}

# A pool whose stores are directories of a file system that is cut off from power.
pool_there() {
    local code=1
    mount -o loop cut.img /mnt >out 2>&1 || return 1
    if serve pool:/tmp/power.pool:disk --cache 1MiB; then
        power disk "$device" expected "$1" >out 2>&1
        code=$?
        end || code=1
    fi
    umount /mnt
    return $code
}
pool_below() {
    local fs=$1 name="$1, pool" n stores=
    seed=$((seed + 1))
    rm -f data.img && truncate -s 256M data.img && made "$fs" data.img && record data.img && mount /dev/mapper/log /mnt || { failed "$name: no log"; return; }
    for n in 1 2 3 4; do mkdir /mnt/s$n && stores="$stores --store d$n=dir:/mnt/s$n"; done
    rm -f power.pool
    # shellcheck disable=SC2086  # options
    "$corbel" pool create power.pool --coding rs:2,2 $stores >out 2>&1 && "$corbel" pool image power.pool disk --size 8MiB --object-size 256KiB >out 2>&1 &&
        serve pool:/tmp/power.pool:disk --cache 1MiB --write-back || { failed "$name: does not start"; umount /mnt; recorded; return; }
    power raw "$device" expected --seed $seed --seconds 40 --count 40 --quiet --log log >wrote 2>&1 || { cp wrote out; failed "$name: the writer (seed $seed)"; }
    sed "s/^/    $name, seed $seed: /" wrote
    end || failed "$name: does not end"
    umount /mnt
    recorded
    replay "$fs" "$name" 6 pool_there
    lies "$name" 2 pool_there
}

if wanted power; then
    seed=${seed:-$((RANDOM * 32768 + RANDOM))}
    echo "    power: seed $seed"
    below "file"
    below "cached" --cache 2MiB
    expect=both
    below "write-back" --cache 2MiB --write-back
    expect=kept meanwhile=kills count=200
    below "killed"
    below "killed, cached" --cache 2MiB
    meanwhile=lie expect=lost count=40
    below "planted: a cache that nobody flushes" --cache 2MiB --write-back
    for fs in ext4 xfs; do
        files_below $fs write-back --cache 2MiB --write-back
        files_above $fs --cache 2MiB --write-back
    done
    pool_below ext4
    rm -f ./*.img power.pool
fi

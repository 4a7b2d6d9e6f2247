#!/bin/busybox sh
# The first process of the guests of guest.rs. `mode`, and the tags of the virtio-fs devices (`devices`), come from the kernel's command line.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in $(cat /lib/order); do
    insmod "/lib/$module.ko" || echo "guest: FAILED insmod $module"
done
for device in $devices; do
    mkdir "/$device"
    mount -t virtiofs "$device" "/$device" || echo "guest: FAILED mount $device"
done

# instructions: its processor does one in a nanosecond of its clock (QEMU's icount), so that the time for which it was not idle counts them.
# /proc/uptime has hundredths of a second, and there is one processor.
busy() {
    read -r up idle < /proc/uptime
    # Hundredths: without leading zeros, which would make them octal.
    echo $((${up%.*} * 100 + 1${up#*.} - ${idle%.*} * 100 - 1${idle#*.}))
}
instructions() {
    ip link set lo up
    ip addr add 10.0.2.15/24 dev eth0
    ip link set eth0 up
    mkdir /nfs
    mount -t nfs4 -o vers=4.2,port=20490,addr=10.0.2.2,clientaddr=10.0.2.15,proto=tcp,sec=sys 10.0.2.2:/files /nfs ||
        echo "guest: FAILED mount nfs"
    ops=$(cat /lib/ops)
    for mount in $devices nfs; do
        file=/$mount/file
        dd if=/dev/zero of=$file bs=64k count=$((ops / 16)) conv=fsync 2> /dev/null || echo "guest: FAILED fill $mount"
        before=$(busy)
        dd if=$file of=/dev/null bs=4k count="$ops" iflag=direct 2> /dev/null || echo "guest: FAILED read $mount"
        dd if=/dev/zero of=$file bs=4k count="$ops" oflag=direct conv=notrunc 2> /dev/null || echo "guest: FAILED write $mount"
        echo "guest: $mount $(($(busy) - before))"
    done
}

# durations: how long each load takes on each device, in turns, by the clock, in microseconds. Nothing of it is served from the guest's memory.
now() {
    adjtimex | {
        while read -r key value; do
            case $key in time.tv_sec:) seconds=$value ;; time.tv_usec:) micros=$value ;; esac
        done
        echo $((seconds % 1000000 * 1000000 + micros))
    }
}
load() { # load NAME COUNT FILE
    case $1 in
    read_4k) dd if="$3" of=/dev/null bs=4k count="$2" iflag=direct 2> /dev/null ;;
    write_4k) dd if=/dev/zero of="$3" bs=4k count="$2" oflag=direct conv=notrunc 2> /dev/null ;;
    read_64k) dd if="$3" of=/dev/null bs=64k count="$2" iflag=direct 2> /dev/null ;;
    write_64k) dd if=/dev/zero of="$3" bs=64k count="$2" oflag=direct conv=notrunc 2> /dev/null ;;
    # One program, which asks so many times.
    stat) (cd "${3%/*}" && yes "${3##*/}" | head -n "$2" | xargs -n "$2" -s 100000 stat -c "" > /dev/null) ;;
    esac
}
durations() {
    for device in $devices; do
        dd if=/dev/zero "of=/$device/file" bs=64k count=1024 2> /dev/null || echo "guest: FAILED fill $device"
    done
    turn=0
    while [ $turn -lt "$turns" ]; do
        while read -r name count; do
            for device in $devices; do
                before=$(now)
                load "$name" "$count" "/$device/file" || echo "guest: FAILED $name $device"
                echo "guest: $name $device $(($(now) - before))"
            done
        done < /lib/loads
        turn=$((turn + 1))
    done
}
$mode
echo "guest: done"
poweroff -f

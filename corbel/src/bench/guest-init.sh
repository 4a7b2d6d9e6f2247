#!/bin/busybox sh
# The first process of the guest of guest.rs. Its processor does one instruction in a nanosecond of its clock (QEMU's icount), so that the time
# for which it was not idle counts them. /proc/uptime has hundredths of a second, and there is one processor.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in $(cat /lib/order); do
    insmod "/lib/$module.ko" || echo "guest: FAILED insmod $module"
done
ip link set lo up
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
mount -t virtiofs corbel /virtiofs || echo "guest: FAILED mount virtiofs"
mount -t nfs4 -o vers=4.2,port=20490,addr=10.0.2.2,clientaddr=10.0.2.15,proto=tcp,sec=sys 10.0.2.2:/files /nfs ||
    echo "guest: FAILED mount nfs"
busy() {
    read -r up idle < /proc/uptime
    # Hundredths: without leading zeros, which would make them octal.
    echo $((${up%.*} * 100 + 1${up#*.} - ${idle%.*} * 100 - 1${idle#*.}))
}
ops=$(cat /lib/ops)
for mount in virtiofs nfs; do
    file=/$mount/file
    dd if=/dev/zero of=$file bs=64k count=$((ops / 16)) conv=fsync 2> /dev/null || echo "guest: FAILED fill $mount"
    before=$(busy)
    dd if=$file of=/dev/null bs=4k count="$ops" iflag=direct 2> /dev/null || echo "guest: FAILED read $mount"
    dd if=/dev/zero of=$file bs=4k count="$ops" oflag=direct conv=notrunc 2> /dev/null || echo "guest: FAILED write $mount"
    echo "guest: $mount $(($(busy) - before))"
done
echo "guest: done"
poweroff -f

#!/bin/busybox sh
# The first process of the guest of ../move.sh, which is moved to another device while it works. What it says begins with `guest: `.
/bin/busybox --install -s /bin
export PATH=/bin
# The firmware has left a line without an end.
echo
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci fuse virtiofs; do
    insmod /lib/$module.ko || echo "guest: FAILED insmod $module"
done
mount -t virtiofs moved /mnt || { echo "guest: FAILED mount"; poweroff -f; }
hold /mnt/lock flock locked &
hold /mnt/record record record &
# Somebody else has it, until after the move.
hold /mnt/awaited flock awaited &
exec 8<>/mnt/nameless
rm /mnt/nameless
echo kept >&8
: >/mnt/log
n=0
while [ ! -e /mnt/stop ]; do
    n=$((n + 1))
    echo $n >>/mnt/log
    sync /mnt/log || echo "guest: FAILED sync $n"
    dd if=/dev/urandom of=/mnt/data bs=64k count=4 conv=fsync 2>/dev/null || echo "guest: FAILED write $n"
    md5sum /mnt/data >/mnt/sum
    md5sum -c /mnt/sum >/dev/null || echo "guest: FAILED sum $n"
    [ $((n % 10)) != 0 ] || echo "guest: at $n"
    usleep 20000
done
if [ "$(wc -l </mnt/log)" = $n ] && [ "$(tail -n 1 /mnt/log)" = $n ]; then echo "guest: ok log"; else echo "guest: FAILED log"; fi
if [ "$(cat /proc/self/fd/8)" = kept ]; then echo "guest: ok nameless"; else echo "guest: FAILED nameless"; fi
exec 8>&-
killall hold
sleep 2
umount /mnt && echo "guest: ok umount"
echo "guest: done"
poweroff -f

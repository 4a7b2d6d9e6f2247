#!/bin/busybox sh
# The first process of the guests of ../guest.sh. Programs are the host's own, by a device that changes nothing; what is tested
# is on /mnt. `suites`, `backend` and `role` come from the kernel's command line.
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
# Programs and what they read; all else is in memory.
mkdir /host && mount -t tmpfs tmpfs /root
if mount -t virtiofs -o ro root /host && mkdir /root/mnt && mount -t virtiofs tested /root/mnt; then
    for dir in usr etc bin sbin lib lib32 lib64 libx32; do
        if [ -L /host/$dir ]; then
            cp -d /host/$dir /root/$dir
        elif [ -d /host/$dir ]; then
            mkdir /root/$dir && mount -o bind /host/$dir /root/$dir || echo "guest: FAILED bind $dir"
        fi
    done
    for dir in proc sys dev; do mkdir /root/$dir && mount -o bind /$dir /root/$dir; done
    mkdir -p -m 1777 /root/tmp /root/run /root/dev/shm /root/var && mount -t tmpfs tmpfs /root/dev/shm
    cp -r /suite /root/tmp/suite
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C backend="$backend" role="$role" suites="$suites" \
        chroot /root /tmp/suite/suites.sh
    umount /root/mnt || echo "guest: FAILED umount"
else
    echo "guest: FAILED mount"
fi
echo "guest: done"
poweroff -f

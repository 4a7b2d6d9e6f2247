#!/bin/busybox sh
# The first process of the guests of ../ublk.sh. Programs are the host's own, by a device that changes nothing; all else is in memory. What it
# says begins with `guest: `. `tests` and `seed` come from the kernel's command line.
/bin/busybox --install -s /bin
export PATH=/bin
# The firmware has left a line without an end.
echo
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
ip link set lo up
mkdir /host && mount -t tmpfs -o size=2500M tmpfs /root
if mount -t virtiofs -o ro root /host; then
    for dir in usr etc bin sbin lib lib32 lib64 libx32; do
        if [ -L /host/$dir ]; then
            cp -d /host/$dir /root/$dir
        elif [ -d /host/$dir ]; then
            mkdir /root/$dir && mount -o bind /host/$dir /root/$dir || echo "guest: FAILED bind $dir"
        fi
    done
    for dir in proc sys dev; do mkdir /root/$dir && mount -o bind /$dir /root/$dir; done
    mkdir -p -m 1777 /root/tmp /root/run /root/var /root/mnt /root/dev/shm && mount -t tmpfs tmpfs /root/dev/shm
    mv /suite /root/tmp/suite
    cp /bin/busybox /root/tmp/suite/
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C tests="$tests" seed="$seed" chroot /root /bin/bash /tmp/suite/tests.sh
else
    echo "guest: FAILED mount"
fi
echo "guest: done"
poweroff -f

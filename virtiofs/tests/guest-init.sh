#!/bin/busybox sh
# The first process of the guest of guest.rs. Each line that says `guest: ok` is expected there, and no `FAILED`.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci fuse virtiofs; do
    insmod /lib/$module.ko || echo "guest: FAILED insmod $module"
done
ok() {
    name=$1
    shift
    if "$@"; then echo "guest: ok $name"; else echo "guest: FAILED $name"; fi
}
is() { [ "$1" = "$2" ] || { echo "guest: FAILED '$1' is not '$2'"; false; }; }

ok mount mount -t virtiofs corbel /mnt
cd /mnt || poweroff -f
ok read is "$(cat hello)" "hello, guest"
ok copy cp from-host copy
ok same cmp from-host copy
ok sync sync copy
ok append sh -c 'echo one > log; echo two >> log; echo three >> log; [ "$(wc -l < log)" = 3 ]'
ok truncate sh -c 'truncate -s 4 log; [ "$(cat log)" = one ]'
ok mkdir mkdir -p a/b/c
ok rename mv log a/b/moved
ok replaced sh -c 'echo new > x; echo old > y; mv x y; [ "$(cat y)" = new ]'
ok link ln y a/linked
ok links is "$(stat -c %h y)" 2
ok symlink ln -s a/b/moved s
ok follow is "$(cat s)" one
ok chmod sh -c 'chmod 640 y; [ "$(stat -c %a y)" = 640 ]'
ok chown sh -c 'chown 1000:1001 y; [ "$(stat -c %u:%g y)" = 1000:1001 ]'
ok many sh -c 'mkdir many; for i in $(seq 1 200); do : > many/f$i; done; [ "$(ls many | wc -l)" = 200 ]'
ok rmdir sh -c '! rmdir many 2>/dev/null'
ok rm rm -r many
ok gone sh -c '! ls many 2>/dev/null'
ok direct dd if=copy of=direct bs=64k iflag=direct oflag=direct conv=fsync
ok direct-same cmp copy direct
ok unlinked sh -c 'exec 3<> open; echo kept >&3; rm open; [ "$(cat /proc/self/fd/3)" = kept ]'
ok outside sh -c '! ls /mnt/.corbel 2>/dev/null && [ ! -e /mnt/../outside ]'
ok df df /mnt
cd /
ok umount umount /mnt
ok again mount -t virtiofs corbel /mnt
ok kept cmp /mnt/from-host /mnt/copy
ok umount-again umount /mnt
echo "guest: done"
poweroff -f

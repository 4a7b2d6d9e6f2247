#!/bin/busybox sh
# The first process of the guest of ../knfsd.sh: the kernel's NFS server as Debian starts it, on ext4. A shell listens at port 7, by which the
# tests see and change files beside the server, and stop and start it (/bin/server). What it says begins with `guest: `.
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
# The firmware has left a line without an end.
echo
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci failover net_failover virtio_net virtio_blk \
    sunrpc auth_rpcgss grace; do
    insmod /lib/$module.ko || echo "guest: FAILED insmod $module"
done
# Its time of grace is as short as it may be.
insmod /lib/lockd.ko nlm_tcpport=32803 nlm_udpport=32803 nlm_timeout=3 nlm_grace_period=3 || echo "guest: FAILED insmod lockd"
for module in nfs_acl nfsd; do insmod /lib/$module.ko || echo "guest: FAILED insmod $module"; done
ip link set lo up
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
ip route add default via 10.0.2.2
mount -t ext4 /dev/vda /disk || echo "guest: FAILED mount the disk"
mkdir -p /disk/files && mount -o bind /disk/files /files && mount -o bind /disk/files /squash
mount -t rpc_pipefs rpc /run/rpc_pipefs || echo "guest: FAILED mount rpc_pipefs"
mount -t nfsd nfsd /proc/fs/nfsd || echo "guest: FAILED mount nfsd"
rpcbind -w || echo "guest: FAILED rpcbind"
rpc.statd --no-notify || echo "guest: FAILED rpc.statd"
nfsdcld || echo "guest: FAILED nfsdcld"
exportfs -ra || echo "guest: FAILED exportfs"
rpc.mountd -p 20048 || echo "guest: FAILED rpc.mountd"
server grace || echo "guest: FAILED server"
echo "guest: kernel $(uname -r), up $(cut -d. -f1 /proc/uptime) s"
# One shell for each connection, until the machine is ended from outside.
nc -ll -p 7 -e /bin/sh
echo "guest: FAILED nc"
poweroff -f

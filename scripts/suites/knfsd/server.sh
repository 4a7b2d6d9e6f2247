#!/bin/busybox sh
# The kernel's NFS server of the guest of ../knfsd.sh: `stop`; `grace`: start, as always; `now`: start, and no time of grace for version 4 (the
# lock manager of version 3 has one of three seconds, which is the shortest).
case $1 in
stop) rpc.nfsd 0 ;;
grace | now)
    # The shortest that there are.
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    rpc.nfsd -V 3 -N 4.1 -N 4.2 8 || exit 1
    # (Busy: it has none, since nobody had a lock.)
    [ "$1" = grace ] || echo Y 2>/dev/null >/proc/fs/nfsd/v4_end_grace || true
    ;;
esac

#!/bin/sh
# The tests of the `nfs` back end on the kernel's NFS server: Debian's kernel in QEMU, in software, with the programs that Debian starts for it.
# The server's ports are those of a network of its own, in which the tests run as well.
# Needs root. Usage: scripts/suites/knfsd.sh [TEST]...   (as cargo test takes them: v3::locks; all if none is named)
set -u
cd "$(dirname "$0")/../.."
root=$(pwd)
if [ "$(id -u)" != 0 ]; then
    echo "skipped: a network of its own takes root"
    exit 0
fi
scripts/prepare.sh tools || exit 1
guest="$root/target/tools/guest"
for program in qemu-system-x86_64 busybox cpio mke2fs rpcbind rpc.statd ip unshare ldd; do
    command -v $program >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
for part in vmlinuz nfsd.ko sbin/rpc.mountd; do
    [ -e "$guest/$part" ] || { echo "skipped: $guest has no $part (scripts/prepare.sh tools)"; exit 0; }
done
if [ "${KNFSD_APART:-}" != 1 ]; then
    cargo test --quiet -p nfs --test server --no-run || exit 1
    exec env KNFSD_APART=1 unshare --net --mount --pid --fork --kill-child --mount-proc "$root/scripts/suites/knfsd.sh" "$@"
fi

dir=$(mktemp -d /dev/shm/corbel-knfsd.XXXXXX) || exit 1
kept="$root/target/guest-knfsd"
rm -rf "$kept"
mkdir -p "$kept"
machine=
finish() {
    [ -z "$machine" ] || kill "$machine" 2>/dev/null
    rm -rf "$dir"
}
trap finish EXIT
trap 'exit 1' INT TERM

# The guest's first file system: the server's programs, and the libraries of this machine that they need.
tree="$dir/initrd"
for part in bin sbin proc sys dev lib etc run/rpc_pipefs run/rpcbind run/sendsigs.omit.d tmp disk files squash \
    var/lib/nfs/sm var/lib/nfs/sm.bak var/lib/nfs/nfsdcld; do mkdir -p "$tree/$part"; done
ln -s /run "$tree/var/run"
ln -s /run/rpc_pipefs "$tree/var/lib/nfs/rpc_pipefs"
cp "$(command -v busybox)" "$tree/bin/busybox"
cp "$guest"/*.ko "$tree/lib/"
cp scripts/suites/knfsd/init.sh "$tree/init"
cp scripts/suites/knfsd/server.sh "$tree/bin/server"
cp "$guest"/sbin/* "$(command -v rpcbind)" "$(command -v rpc.statd)" "$tree/sbin/"
ldd "$tree"/sbin/* | grep -o '/[^ :]*\.so[^ :]*' | sort -u | while read -r library; do
    mkdir -p "$tree$(dirname "$library")"
    cp -L "$library" "$tree$library"
done
cp /etc/netconfig "$tree/etc/"
cat >"$tree/etc/passwd" <<TEXT
root:x:0:0::/:/bin/sh
_rpc:x:106:65534::/run/rpcbind:/bin/false
statd:x:107:65534::/var/lib/nfs:/bin/false
nobody:x:65534:65534::/:/bin/false
TEXT
printf 'root:x:0:\nnogroup:x:65534:\n' >"$tree/etc/group"
printf '127.0.0.1 localhost\n' >"$tree/etc/hosts"
printf 'sunrpc 111/tcp portmapper\nsunrpc 111/udp portmapper\nnfs 2049/tcp\nnfs 2049/udp\n' >"$tree/etc/services"
printf 'tcp 6 TCP\nudp 17 UDP\n' >"$tree/etc/protocols"
# (Requests come from where QEMU's user network makes them, whatever port the tests have.)
cat >"$tree/etc/exports" <<TEXT
/files *(rw,insecure,no_subtree_check,no_root_squash,fsid=1)
/squash *(rw,insecure,no_subtree_check,root_squash,fsid=2)
TEXT
(cd "$tree" && find . | cpio -o -H newc --quiet) >"$dir/initrd.cpio"
rm -rf "$tree"
truncate -s 512M "$dir/disk"
mke2fs -q -t ext4 "$dir/disk" || exit 1

ip link set lo up
forward=
for port in 7 111 2049 20048 32803; do forward="$forward,hostfwd=tcp:127.0.0.1:$port-:$port"; done
begun=$(date +%s)
echo "== knfsd"
qemu-system-x86_64 -M pc -cpu max -accel tcg -m 512M -nographic -no-reboot -nodefaults -serial "file:$kept/guest" \
    -drive "file=$dir/disk,format=raw,if=virtio,cache=unsafe" -netdev "user,id=n$forward" -device virtio-net-pci,netdev=n,romfile= \
    -append "console=ttyS0 quiet panic=-1 tsc=unstable" -kernel "$guest/vmlinuz" -initrd "$dir/initrd.cpio" >"$kept/qemu" 2>&1 </dev/null &
machine=$!
n=0
until grep -q '^guest: kernel' "$kept/guest" 2>/dev/null; do
    n=$((n + 1))
    if [ $n -ge 1200 ] || ! kill -0 $machine 2>/dev/null; then
        echo "knfsd: FAILED the server does not come up"
        tail -n 20 "$kept"/*
        exit 1
    fi
    sleep 0.1
done
sed -n 's/\r$//; s/^guest: //p' "$kept/guest"
CORBEL_NFS_SERVER=127.0.0.1:7 cargo test --quiet --offline -p nfs --test server -- --test-threads=1 "$@" >"$kept/tests" 2>&1
result=$?
grep -E '^test .*FAILED$|^---- |^thread .* panicked|^SEED=|^test result: ' "$kept/tests"
! grep -q '^guest: FAILED' "$kept/guest" || result=1
echo "knfsd: $(sed -nE 's/^test result: .* ([0-9]+ passed; [0-9]+ failed).*/\1/p' "$kept/tests"), $(($(date +%s) - begun)) s"
[ $result = 0 ] || { echo "what it said: $kept"; exit 1; }
rm -rf "$kept"

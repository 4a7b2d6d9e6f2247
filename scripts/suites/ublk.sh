#!/bin/sh
# `corbel ublk` under a kernel that has ublk_drv: a guest in QEMU, in software, with the kernels of Debian 13 and of its backports. The guest's
# programs are this machine's: its root is / by a virtio-fs device of ours, which changes nothing.
# Needs root. Usage: scripts/suites/ublk.sh [KERNEL]...   (all if none is named: trixie trixie-backports)
# Sections: driver memory file volume filesystems power nbd. TESTS="file volume" runs these only; SEED=N
# is the seed of the section `power`, which says its own; CORBEL is the program, if it shall not be built.
set -u
cd "$(dirname "$0")/../.."
root=$(pwd)
limit=${LIMIT:-3600}
if [ "$(id -u)" != 0 ]; then
    echo "skipped: programs of this machine, and clusters, take root"
    exit 0
fi
scripts/prepare.sh ublk || exit 1
for program in qemu-system-x86_64 busybox cpio fio mkfs.ext4 mkfs.xfs blkdiscard dmsetup losetup nbd-client /usr/bin/python3; do
    command -v $program >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
if [ -z "${CORBEL:-}" ]; then
    cargo build --quiet --release -p intercept && cargo build --quiet --release -p corbel || exit 1
fi
corbel=${CORBEL:-$root/target/release/corbel}
[ $# != 0 ] || set -- trixie trixie-backports

# In memory, but for what a failure leaves.
dir=$(mktemp -d /dev/shm/corbel-ublk.XXXXXX) || exit 1
chmod 755 "$dir"
started=
finish() {
    # shellcheck disable=SC2086  # process ids
    [ -z "$started" ] || kill $started 2>/dev/null
    rm -rf "$dir"
}
trap finish EXIT
trap 'exit 1' INT TERM

for part in bin proc sys dev root lib suite; do mkdir -p "$dir/initrd/$part"; done
cp "$(command -v busybox)" "$dir/initrd/bin/busybox"
cp scripts/suites/ublk/init.sh "$dir/initrd/init"
cp scripts/suites/ublk/*.sh scripts/suites/ublk/*.py target/tools/bin/fsx "$dir/initrd/suite/"
cp corbel/tests/fsx/all.toml "$dir/initrd/suite/fsx.toml"
strip -o "$dir/initrd/suite/corbel" "$corbel" || exit 1

failed=0
for kernel in "$@"; do
    guest="$root/target/tools/ublk/$kernel"
    [ -e "$guest/vmlinuz" ] || { echo "skipped: no kernel $kernel (scripts/prepare.sh ublk)"; continue; }
    kept="$root/target/guest-ublk-$kernel"
    rm -rf "$kept"
    mkdir -p "$kept"
    begun=$(date +%s)
    echo "== ublk: $kernel"
    rm -rf "$dir/initrd/suite/modules"
    cp -r "$guest/ublk_drv.ko" "$guest/modules" "$dir/initrd/suite/"
    (cd "$dir/initrd" && find . | cpio -o -H newc --quiet) >"$dir/initrd.cpio"
    rm -f "$dir/root.sock"
    "$corbel" virtiofs --once --socket-path "$dir/root.sock" --backend dir --shared-dir / --readonly --cache always >"$kept/device" 2>&1 &
    started="$started $!"
    n=0
    until [ -e "$dir/root.sock" ]; do
        n=$((n + 1))
        [ $n -lt 600 ] || { echo "ublk: FAILED the device of the programs does not come up"; cat "$kept/device"; exit 1; }
        sleep 0.1
    done
    timeout -k 5 "$limit" qemu-system-x86_64 -M pc -cpu max -accel tcg -smp 2 -m 3G -nographic -no-reboot -nodefaults \
        -serial stdio -object memory-backend-memfd,id=m,size=3G,share=on -numa node,memdev=m \
        -chardev "socket,id=root,path=$dir/root.sock" \
        -device vhost-user-fs-pci,chardev=root,tag=root,num-request-queues=1 \
        -append "console=ttyS0 quiet panic=-1 tsc=unstable seed=${SEED:-} \"tests=${TESTS:-all}\"" \
        -kernel "$guest/vmlinuz" -initrd "$dir/initrd.cpio" </dev/null 2>&1 |
        sed -u 's/\r$//' | tee "$kept/said" | grep --line-buffered '^    \|^guest: ' | sed -u "s/^guest: /$kernel: /"
    passed=$(grep -c '^guest: ok' "$kept/said")
    wrong=$(grep -c '^guest: FAILED' "$kept/said")
    # A guest that did not come to its end has failed, too.
    grep -q '^guest: done' "$kept/said" || { echo "$kernel: FAILED it did not come to its end"; wrong=$((wrong + 1)); }
    echo "ublk: $kernel: $passed passed, $wrong failed, $(($(date +%s) - begun)) s"
    if [ "$wrong" != 0 ] || [ "$passed" = 0 ]; then
        echo "what it said: $kept"
        failed=$((failed + 1))
    else
        rm -rf "$kept"
    fi
done
[ $failed = 0 ]

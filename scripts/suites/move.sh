#!/bin/sh
# A real guest is moved by QEMU between virtio-fs devices at two nodes of a cluster, while it writes, syncs and holds locks for which somebody
# at a third node tries all the time, and while it waits for a lock itself. Debian's kernel, in software.
# Needs root, and QEMU 8.2 or later (Debian 12: bookworm-backports): QEMU="qemu-system-x86_64 ARGS" names another than the one that is found.
# Usage: scripts/suites/move.sh     CORBEL is the program, if it shall not be built.
set -u
cd "$(dirname "$0")/../.."
root=$(pwd)
qemu=${QEMU:-qemu-system-x86_64}
if [ "$(id -u)" != 0 ]; then
    echo "skipped: clusters take root"
    exit 0
fi
scripts/prepare.sh tools || exit 1
guest="$root/target/tools/guest"
for program in ${qemu%% *} busybox cpio python3 cc; do
    command -v "$program" >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
[ -e "$guest/vmlinuz" ] || { echo "skipped: no kernel for a guest (scripts/prepare.sh tools)"; exit 0; }
# shellcheck disable=SC2086  # a program and its arguments
version=$($qemu --version | sed -n 's/^QEMU emulator version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
[ "$((${version% *} * 100 + ${version#* }))" -ge 802 ] || { echo "skipped: QEMU ${version% *}.${version#* } does not hand on the state of such devices; 8.2 and later do"; exit 0; }
if [ -z "${CORBEL:-}" ]; then
    cargo build --quiet --release -p intercept && cargo build --quiet --release -p corbel || exit 1
fi
corbel=${CORBEL:-$root/target/release/corbel}
host="$root/scripts/suites/move/host.py"

dir=$(mktemp -d /dev/shm/corbel-move.XXXXXX) || exit 1
kept="$root/target/guest-move"
rm -rf "$kept"
mkdir -p "$kept"
started=
finish() {
    # shellcheck disable=SC2086  # process ids
    [ -z "$started" ] || kill $started 2>/dev/null
    "$corbel" cluster down --dir "$dir/cluster" >/dev/null
    rm -rf "$dir"
}
trap finish EXIT
trap 'exit 1' INT TERM
fail() {
    echo "move: FAILED $1"
    tail -n 5 "$kept"/*
    echo "what it said: $kept"
    exit 1
}
# until_said SECONDS FILE WORDS
until_said() {
    n=0
    until grep -q "$3" "$2" 2>/dev/null; do
        n=$((n + 1))
        [ $n -lt $((10 * $1)) ] || fail "$3 is not said in $2"
        sleep 0.1
    done
}

for part in bin proc sys dev mnt lib; do mkdir -p "$dir/initrd/$part"; done
cp "$(command -v busybox)" "$dir/initrd/bin/busybox"
cp "$guest"/*.ko "$dir/initrd/lib/"
cp scripts/suites/move/init.sh "$dir/initrd/init"
cc -O1 -static -o "$dir/initrd/bin/hold" scripts/suites/move/hold.c || exit 1
(cd "$dir/initrd" && find . | cpio -o -H newc --quiet) >"$dir/initrd.cpio"

begun=$(date +%s)
"$corbel" cluster up --nodes 3 --dir "$dir/cluster" >"$kept/cluster" 2>&1 || exit 1
(umask 077 && head -c 32 /dev/urandom >"$dir/key")
for node in 1 2; do
    "$corbel" virtiofs --log-level info --socket-path "$dir/$node.sock" --source "$dir/cluster/n$node/run/hostd.sock" \
        --migration-key "$dir/key" --tenant moved >"$kept/device-$node" 2>&1 &
    started="$started $!"
done
python3 "$host" keep "$dir/cluster/n3/mnt/awaited" &
keeper=$!
started="$started $keeper"
# machine N ARGS...
machine() {
    node=$1
    shift
    n=0
    until [ -e "$dir/$node.sock" ]; do
        n=$((n + 1))
        [ $n -lt 600 ] || fail "device $node does not come up"
        sleep 0.1
    done
    # shellcheck disable=SC2086  # a program and its arguments
    timeout -k 5 600 $qemu -M pc -cpu max -accel tcg -m 256M -nographic -no-reboot -nodefaults -serial "file:$kept/guest-$node" \
        -object memory-backend-memfd,id=m,size=256M,share=on -numa node,memdev=m -chardev "socket,id=fs,path=$dir/$node.sock" \
        -device vhost-user-fs-pci,chardev=fs,tag=moved,num-request-queues=2 -monitor "unix:$dir/monitor-$node,server,nowait" \
        -append "console=ttyS0 quiet panic=-1 tsc=unstable" -kernel "$guest/vmlinuz" -initrd "$dir/initrd.cpio" "$@" \
        >"$kept/qemu-$node" 2>&1 </dev/null &
    started="$started $!"
}
machine 1
until_said 120 "$kept/guest-1" "guest: at 20"
until_said 10 "$kept/guest-1" "guest: ok record"
machine 2 -incoming "unix:$dir/stream"
python3 "$host" tries 12 "$dir/cluster/n3/mnt" >"$kept/tries" 2>&1 &
tries=$!
sleep 2
python3 "$host" monitor "$dir/monitor-1" "migrate -d unix:$dir/stream" >"$kept/migrate"
n=0
until python3 "$host" monitor "$dir/monitor-1" "info migrate" >"$kept/migrate" && grep -qE "completed|failed" "$kept/migrate"; do
    n=$((n + 1))
    [ $n -lt 100 ] || fail "the guest does not move"
    sleep 0.2
done
grep -q completed "$kept/migrate" || fail "the guest has not moved"
grep -aoE "(total time|downtime): [0-9]+ ms" "$kept/migrate"
until_said 30 "$kept/guest-2" "guest: at "
wait $tries || fail "somebody else got a lock: $(cat "$kept/tries")"
echo "locks: $(cat "$kept/tries"), all in vain"
! grep -q awaited "$kept/guest-1" "$kept/guest-2" || fail "it has what somebody else has"
kill $keeper
until_said 30 "$kept/guest-2" "guest: ok awaited"
: >"$dir/cluster/n3/mnt/stop"
until_said 60 "$kept/guest-2" "guest: done"
! grep -h FAILED "$kept/guest-1" "$kept/guest-2" || fail "the guest"
for word in log nameless umount; do grep -q "guest: ok $word" "$kept/guest-2" || fail "$word"; done
echo "move: ok, $(grep -c 'guest: at' "$kept/guest-1") and $(grep -c 'guest: at' "$kept/guest-2") steps of ten at each side, $(($(date +%s) - begun)) s"
rm -rf "$kept"

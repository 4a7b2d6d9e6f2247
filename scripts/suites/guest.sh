#!/bin/sh
# The long form of the tests with a real guest: Debian's kernel in QEMU, in software, and suites of others on a
# virtio-fs device of ours, for each back end; then two guests at once on one volume. The guest's programs are this
# machine's: its root is / by a second device, which changes nothing.
# Needs root. Usage: scripts/suites/guest.sh [BACKEND]...   (all if none is named: corbel dir nfs4 nfs3; pair: two guests
# on one volume, by devices at two nodes; beside: by devices at one node)
# SUITES="fsx git" runs these only; CORBEL is the program, if it shall not be built.
set -u
cd "$(dirname "$0")/../.."
root=$(pwd)
self="$root/scripts/suites/guest.sh"
suites=${SUITES:-all}
# A guest that takes longer hangs.
limit=${LIMIT:-1500}
if [ "$(id -u)" != 0 ]; then
    echo "skipped: programs of this machine, and clusters, take root"
    exit 0
fi
scripts/prepare.sh tools || exit 1
guest="$root/target/tools/guest"
for program in qemu-system-x86_64 busybox cpio; do
    command -v $program >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
[ -e "$guest/vmlinuz" ] || { echo "skipped: no kernel for a guest (scripts/prepare.sh tools)"; exit 0; }
if [ -z "${CORBEL:-}" ]; then
    cargo build --quiet --release -p intercept && cargo build --quiet --release -p corbel || exit 1
fi
corbel=${CORBEL:-$root/target/release/corbel}

# A server has a network and a tree of mounts of its own, and so has all that speaks to it: this script, once more.
case "$*" in
nfs3 | nfs4)
    for program in ganesha.nfsd rpcbind rpc.statd ip unshare; do
        command -v $program >/dev/null || { echo "skipped: $1: $program is not installed"; exit 0; }
    done
    [ "${GUEST_APART:-}" = 1 ] || exec env GUEST_APART=1 unshare --net --mount --pid --fork --kill-child --mount-proc "$self" "$@"
    ;;
*)
    if [ $# != 1 ]; then
        [ $# != 0 ] || set -- corbel dir nfs4 nfs3 pair beside
        failed=0
        for backend in "$@"; do "$self" "$backend" || failed=$((failed + 1)); done
        echo "guests of $# back ends: $failed failed"
        [ $failed = 0 ]
        exit
    fi
    ;;
esac
backend=$1

# In memory, but for what a failure leaves.
dir=$(mktemp -d /dev/shm/corbel-guest.XXXXXX) || exit 1
kept="$root/target/guest-$backend"
rm -rf "$kept"
mkdir -p "$kept"
# (Users of the guest are users here, for a server.)
chmod 755 "$dir"
started= cluster=
finish() {
    # shellcheck disable=SC2086  # process ids
    [ -z "$started" ] || kill $started 2>/dev/null
    [ -z "$cluster" ] || "$corbel" cluster down --dir "$dir/cluster" >/dev/null
    rm -rf "$dir"
}
trap finish EXIT
trap 'exit 1' INT TERM

# device NAME ARGS...: one that ends with its guest
device() {
    name=$1
    shift
    "$corbel" virtiofs --once --log-level info --socket-path "$dir/$name.sock" "$@" >"$kept/device-$name" 2>&1 &
    started="$started $!"
}
# until_there FILE WHOSE
until_there() {
    n=0
    until [ -e "$1" ]; do
        n=$((n + 1))
        [ $n -lt 600 ] || { echo "guest: FAILED $2 does not come up"; tail -n 5 "$kept"/*; exit 1; }
        sleep 0.1
    done
}

# The first file system of all guests.
initrd() {
    suite="$dir/initrd/suite"
    for part in bin proc sys dev root lib suite; do mkdir -p "$dir/initrd/$part"; done
    cp "$(command -v busybox)" "$dir/initrd/bin/busybox"
    cp "$guest"/*.ko "$dir/initrd/lib/"
    cp scripts/suites/guest/init.sh "$dir/initrd/init"
    cp scripts/suites/guest/* target/tools/bin/fsx target/tools/bin/pjdfstest "$suite/"
    # The guest's kernel asks no file system for the time when a file was made (Linux does so from 6.6 on).
    fuse="/^stat_st_birthtime/d"
    # What NFS before 4.2 has not: room that is promised, and holes.
    case $backend in nfs*) fuse="$fuse; /^posix_fallocate/d; s/^punch_hole = .*/punch_hole = 0/" ;; esac
    sed "$fuse" corbel/tests/pjdfstest/config.toml >"$suite/pjdfstest.toml"
    sed "s/^allow_remount = .*/allow_remount = true/" "$suite/pjdfstest.toml" >"$suite/readonly.toml"
    sed "$fuse" corbel/tests/fsx/calls.toml >"$suite/fsx-calls.toml"
    sed "$fuse" corbel/tests/fsx/all.toml >"$suite/fsx-mapped.toml"
    tar -C corbel/tests --transform 's,^,source/,' -cf "$suite/source.tar" run hunt
    (cd "$dir/initrd" && find . | cpio -o -H newc --quiet) >"$dir/initrd.cpio"
}

# boot NAME ROLE: a guest whose tested device is NAME, to its end; what it said is in $kept/NAME
boot() {
    device "root-$1" --backend dir --shared-dir / --readonly --cache always
    until_there "$dir/root-$1.sock" "the device of the programs"
    until_there "$dir/$1.sock" "the device"
    timeout -k 5 "$limit" qemu-system-x86_64 -M pc -cpu max -accel tcg -smp 2 -m 1G -nographic -no-reboot -nodefaults \
        -serial stdio -object memory-backend-memfd,id=m,size=1G,share=on -numa node,memdev=m \
        -chardev "socket,id=tested,path=$dir/$1.sock" \
        -device vhost-user-fs-pci,chardev=tested,tag=tested,num-request-queues=2 \
        -chardev "socket,id=root,path=$dir/root-$1.sock" \
        -device vhost-user-fs-pci,chardev=root,tag=root,num-request-queues=1 \
        -append "console=ttyS0 quiet panic=-1 tsc=unstable backend=$backend role=$2 \"suites=$suites\"" \
        -kernel "$guest/vmlinuz" -initrd "$dir/initrd.cpio" </dev/null 2>&1 |
        sed -u 's/\r$//' | tee "$kept/$1" | grep --line-buffered '^    \|^guest: ' | sed -u "s/^guest: /$1: /"
}

cluster() {
    "$corbel" cluster up --nodes 3 --dir "$dir/cluster" --capacity 2GiB --no-mount >"$kept/cluster" 2>&1 || exit 1
    cluster=yes
}
volume() { # volume NAME NODE
    device "$1" --source "$dir/cluster/n$2/run/hostd.sock" --xattr
}

# NFS-Ganesha with its port mapper and its status monitor, in namespaces of their own.
server() {
    ip link set lo up
    mount -t tmpfs -o mode=755 none /run && mkdir -p /run/ganesha /run/rpcbind /run/sendsigs.omit.d
    mount -t tmpfs -o mode=755 none /var/lib/nfs && mkdir -p /var/lib/nfs/ganesha/v4recov /var/lib/nfs/sm /var/lib/nfs/sm.bak
    mkdir "$dir/files"
    cat >"$dir/ganesha" <<TEXT
NFS_CORE_PARAM { Enable_NLM = true; Enable_RQUOTA = false; Protocols = 3,4; mount_path_pseudo = true;
    NFS_Port = 2049; MNT_Port = 20048; NLM_Port = 32803; }
NFSV4 { RecoveryBackend = fs; Graceless = true; }
EXPORT_DEFAULTS { SecType = sys; Access_Type = RW; Attr_Expiration_Time = 0; }
EXPORT { Export_Id = 1; Path = $dir/files; Pseudo = /files; Squash = No_Root_Squash; FSAL { Name = VFS; } }
TEXT
    rpcbind -f &
    until_there /run/rpcbind.sock rpcbind
    rpc.statd -F --no-notify &
    ganesha.nfsd -F -f "$dir/ganesha" -L "$kept/ganesha" -p "$dir/ganesha.pid" &
    n=0
    # 2049 and 32803, where it listens.
    until grep -qi ':0801 .* 0A ' /proc/net/tcp /proc/net/tcp6 && grep -qi ':8023 .* 0A ' /proc/net/tcp /proc/net/tcp6; do
        n=$((n + 1))
        [ $n -lt 600 ] || { echo "guest: FAILED the server does not come up"; tail -n 5 "$kept/ganesha"; exit 1; }
        sleep 0.1
    done
    # It listens before it knows its exports.
    sleep 3
}

begun=$(date +%s)
echo "== guest: $backend"
initrd
case $backend in
corbel)
    cluster
    volume corbel 1
    boot corbel ""
    ;;
dir)
    mkdir "$dir/files"
    device dir --backend dir --shared-dir "$dir/files" --xattr
    boot dir ""
    ;;
nfs3 | nfs4)
    server
    device "$backend" --backend nfs --source "nfs://127.0.0.1/files?version=${backend#nfs}&timeout=60"
    boot "$backend" ""
    ;;
pair | beside)
    cluster
    volume one 1
    volume two $([ "$backend" = pair ] && echo 2 || echo 1)
    boot one one &
    first=$!
    boot two two
    wait $first
    ;;
*)
    echo "guest: no back end $backend" >&2
    exit 2
    ;;
esac

# A guest that did not come to its end has failed, too.
wrong=0 passed=0 skipped=0
case $backend in pair | beside) names="one two" ;; *) names=$backend ;; esac
for name in $names; do
    passed=$((passed + $(grep -c '^guest: ok' "$kept/$name")))
    skipped=$((skipped + $(grep -c '^guest: skipped' "$kept/$name")))
    wrong=$((wrong + $(grep -c '^guest: FAILED' "$kept/$name")))
    grep -q '^guest: done' "$kept/$name" || { echo "$name: FAILED it did not come to its end"; wrong=$((wrong + 1)); }
done
echo "guest: $backend: $passed passed, $wrong failed, $skipped skipped, $(($(date +%s) - begun)) s"
[ $wrong = 0 ] || { echo "what it said: $kept"; exit 1; }
[ $passed != 0 ] || { echo "guest: FAILED nothing ran"; exit 1; }
rm -rf "$kept"

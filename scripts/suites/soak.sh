#!/bin/sh
# Suites of others on a local cluster of three nodes, for SECONDS: fsx with seeds that no run has seen, in turn
# through the mount and under `corbel run`, with mapping and without; then LevelDB, the build and pgbench once each.
# Needs root and /dev/fuse; says so and passes without. Usage: scripts/suites/soak.sh SECONDS
set -u
cd "$(dirname "$0")/../.."
root=$(pwd)
seconds=$1
if [ "$(id -u)" != 0 ] || ! [ -e /dev/fuse ]; then
    echo "skipped: no right to mount here"
    exit 0
fi
scripts/prepare.sh tools || exit 1
cargo build --quiet --release -p intercept && cargo build --quiet --release -p corbel || exit 1
corbel="$root/target/release/corbel"
dir=/dev/shm/corbel-soak-$$
"$corbel" cluster up --nodes 3 --dir "$dir" --capacity 2GiB >/dev/null || exit 1
failed=0
# What a failure left is kept: the log and the files that fsx wrote.
trap '"$corbel" cluster down --dir "$dir" >/dev/null; [ $failed != 0 ] || rm -rf "$kept"' EXIT
trap 'exit 1' INT TERM
mnt="$dir/n1/mnt"
kept="$root/target/soak-$$"
mkdir -p "$kept"

in_mount() { timeout -k 5 600 "$@"; }
in_run() { timeout -k 5 600 "$corbel" run --mount "$mnt" --socket "$dir/n1/run/hostd.sock" -- "$@"; }
fail() {
    failed=$((failed + 1))
    echo "== failed: $1 (its output: $kept/$failed.log)" >&2
    mv "$kept/log" "$kept/$failed.log"
    grep -m 3 -A 2 panicked "$kept/$failed.log" >&2 || tail -5 "$kept/$failed.log" >&2
}
# fsx CONFIG SEED NAME: in the working directory
fsx() {
    "in_$view" "$root/target/tools/bin/fsx" -f "$root/corbel/tests/fsx/$1.toml" -S "$2" -N 10000 -P "$kept" "$3"
}
# Whether it fails on the file system of this directory as well: it draws calls that are an error
# anywhere (posix_fallocate of no bytes).
fails_anywhere() {
    (cd "$kept" && view=mount && ! fsx "$1" "$2" native >"$kept/native.log" 2>&1)
}

seed=$(date +%s)000
end=$(($(date +%s) + seconds))
runs=0
cd "$mnt" || exit 1
while [ "$(date +%s)" -lt "$end" ] && [ $failed -lt 3 ]; do
    for view in mount run; do
        for config in all calls; do
            seed=$((seed + 1))
            runs=$((runs + 1))
            name="fsx-$config-$view-$seed"
            if fsx "$config" "$seed" "$name" >"$kept/log" 2>&1 || fails_anywhere "$config" "$seed"; then
                rm -f "$name"*
            else
                fail "$name"
            fi
        done
    done
done
for view in mount run; do
    mkdir "$mnt/$view"
    "in_$view" /usr/bin/python3 "$root/scripts/suites/leveldb.py" "$mnt/$view" >"$kept/log" 2>&1
    case $? in 0 | 3) ;; *) fail "LevelDB ($view)" ;; esac
    "in_$view" "$root/scripts/suites/build.sh" "$mnt/$view" "$kept" >"$kept/log" 2>&1 || fail "build ($view)"
done
chmod 755 "$dir" "$dir/n1" "$kept"
in_mount "$root/scripts/suites/pgbench.sh" "$mnt/mount" "$kept" >"$kept/log" 2>&1
case $? in 0 | 3) ;; *) fail "pgbench" ;; esac
cd "$root" || exit 1
echo "$((runs * 10000)) operations of fsx in $runs runs (last seed $seed); LevelDB, a build, pgbench: $failed failures"
[ $failed = 0 ]

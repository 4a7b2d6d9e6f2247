#!/bin/sh
# Runs suites of others through the mount and under `corbel run`, on a local cluster of three nodes,
# and writes docs/scorecard.md: suite by suite passed, failed, or not applicable and why.
# Needs root. Usage: scripts/scorecard.sh [DIR]   (DIR: where the cluster lives, in memory)
set -u
cd "$(dirname "$0")/.."
root=$(pwd)
dir=${1:-/dev/shm/corbel-score}
corbel="$root/target/debug/corbel"
tools="$root/target/tools/bin"
card="$root/docs/scorecard.md"
limit=60

scripts/prepare.sh tools || exit 1
for package in stress-ng fio dbench rsync; do
    command -v "$package" >/dev/null || {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package"
    }
done
/usr/bin/python3 -c 'import plyvel' 2>/dev/null ||
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-plyvel
cargo build --quiet -p intercept && cargo build --quiet -p corbel || exit 1

"$corbel" cluster up --nodes 3 --dir "$dir" --capacity 2GiB >/dev/null || exit 1
# What mount(8) runs for a remount; only while this runs, if it is not there.
helper=/sbin/mount.fuse.corbel
[ -e "$helper" ] && helper= || ln -s "$corbel" "$helper"
trap '"$corbel" cluster down --dir "$dir" >/dev/null; [ -z "$helper" ] || rm "$helper"' EXIT
mnt="$dir/n1/mnt"
log="$dir/score"
mkdir -p "$log" "$dir/second"
chmod 777 "$dir/second"

# view PROGRAM ARGS...: in the mount, or on the fast path
in_mount() { timeout -k 5 "$limit" "$@"; }
in_run() {
    timeout -k 5 "$limit" "$corbel" run --mount "$mnt" --socket "$dir/n1/run/hostd.sock" -- "$@"
}

# row SUITE CASE VIEW EXIT [REASON]: a code of 0 passed, 3 (stress-ng: no resource) or a reason: n/a
rows="$log/rows"
: > "$rows"
row() {
    verdict=failed
    [ "$4" = 0 ] && verdict=passed
    [ -n "${5:-}" ] && verdict="n/a: $5"
    echo "$1|$2|$3|$verdict" >> "$rows"
    echo "$1 $2 ($3): $verdict"
}

for view in mount run; do
    at="$mnt/$view"
    mkdir "$at"
    chmod 777 "$at"
    cd "$at" || exit 1

    for config in all calls; do
        for seed in 1 2 3; do
            "in_$view" "$tools/fsx" -f "$root/corbel/tests/fsx/$config.toml" -S "$seed" -N 4000 \
                -P "$log" "fsx-$config-$seed" >"$log/fsx-$config-$seed-$view" 2>&1
            row fsx "$config, seed $seed" "$view" $?
        done
    done

    # Cases of read-only file systems remount, which nobody may have files open for who does not close them, as
    # others of the suite do: they run by themselves. The fast path knows nothing of a mount's flags.
    sed "s/^allow_remount = .*/allow_remount = true/" "$root/corbel/tests/pjdfstest/config.toml" >"$log/remount.toml"
    "in_$view" "$tools/pjdfstest" -c "$root/corbel/tests/pjdfstest/config.toml" -p "$at" \
        -s "$dir/second" >"$log/pjdfstest-$view" 2>&1
    if [ "$view" = mount ]; then
        sed -i '/::erofs_/d' "$log/pjdfstest-$view"
        "in_$view" "$tools/pjdfstest" -c "$log/remount.toml" -p "$at" -s "$dir/second" erofs \
            >>"$log/pjdfstest-$view" 2>&1
    fi
    sed -nE 's/^([a-z_0-9:]+) +(ok|FAILED|skipped)$/\1 \2/p' "$log/pjdfstest-$view" |
        while read -r case verdict; do
            case $verdict in
            ok) row pjdfstest "$case" "$view" 0 ;;
            skipped) row pjdfstest "$case" "$view" 0 "needs a remount, or a limit that is not told" ;;
            *) row pjdfstest "$case" "$view" 1 ;;
            esac
        done >/dev/null

    for engine in psync sync pvsync mmap libaio posixaio io_uring; do
        "in_$view" fio --name="$engine" --directory="$at" --ioengine="$engine" --rw=randwrite \
            --bs=1k-16k --size=8m --verify=crc32c --do_verify=1 --verify_fatal=1 --iodepth=4 \
            --end_fsync=1 --output="$log/fio-$engine-$view" 2>"$log/fio-$engine-$view.err"
        row "fio --verify" "$engine" "$view" $?
    done

    for case in access chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup \
        fallocate fcntl fiemap file-ioctl filename flock fpunch fsize fstat getdent handle hdd \
        inode-flags inotify io iomix lease link locka lockf lockofd mknod open rename symlink \
        sync-file touch utime verity xattr; do
        rm -rf "$at/stress" && mkdir "$at/stress"
        size=""
        # It calls sync(2): what others have written on this machine shall not count.
        [ "$case" = io ] && sync
        case $case in hdd | iomix | fallocate) size="--$case-bytes 16m" ;; esac
        # shellcheck disable=SC2086  # an option and its value, or nothing
        "in_$view" stress-ng --temp-path "$at/stress" "--$case" 2 "--$case-ops" 40 --timeout 2 \
            $size --verify >"$log/stress-$case-$view" 2>&1
        code=$?
        reason=""
        [ $code = 3 ] && reason="stress-ng found no resource for it"
        [ "$view-$case" = run-dnotify ] && reason="the kernel does not see what is done in the process"
        [ $code = 4 ] && reason="not implemented by the file system, says stress-ng"
        row stress-ng "$case" "$view" $code "$reason"
    done

    "in_$view" dbench -D "$at" -c /usr/share/dbench/client.txt -t 8 4 >"$log/dbench-$view" 2>&1
    row dbench "4 clients" "$view" $?

    "in_$view" rsync -aHAX /usr/include/linux/ "$at/tree/" >"$log/rsync-$view" 2>&1 &&
        rm -rf "$dir/back" && "in_$view" rsync -aHAX "$at/tree/" "$dir/back/" &&
        diff -r /usr/include/linux "$dir/back" &&
        [ -z "$(rsync -aHAXni --delete /usr/include/linux/ "$dir/back/")" ]
    row "rsync -aHAX" "there and back" "$view" $?

    "in_$view" /usr/bin/python3 "$root/scripts/suites/leveldb.py" "$at" >"$log/leveldb-$view" 2>&1
    row LevelDB "kill -9 of the writer, six times" "$view" $?

    "in_$view" "$root/scripts/suites/build.sh" "$at" "$log" >"$log/build-$view" 2>&1
    row build "git clone, fsck, gc; cargo build" "$view" $?

    if [ "$view" = mount ]; then
        # Its user must be able to reach the directory.
        chmod 755 "$dir" "$dir/n1" "$log"
        "in_$view" "$root/scripts/suites/pgbench.sh" "$at" "$log" >"$log/pgbench-$view" 2>&1
        code=$? reason=
        [ $code = 3 ] && reason="PostgreSQL is not installed"
        row PostgreSQL "pgbench, kill -9 of the server" "$view" $code "$reason"
    fi

    cd "$root" || exit 1
done

{
    echo "# Scorecard"
    echo
    echo "Made by \`scripts/scorecard.sh\` on a cluster of three nodes, commit $(git rev-parse --short HEAD)."
    echo "\"run\" is the fast path (\`corbel run\`), \"mount\" the kernel's."
    echo
    echo "| suite | view | passed | failed | not applicable |"
    echo "| --- | --- | --- | --- | --- |"
    awk -F'|' '{k = $1 "|" $3; n[k]++; if ($4 == "passed") p[k]++; else if ($4 == "failed") f[k]++; else a[k]++}
        END {for (k in n) {split(k, s, "|"); printf "| %s | %s | %d | %d | %d |\n", s[1], s[2], p[k], f[k], a[k]}}' "$rows" | sort
    echo
    echo "## What did not pass"
    echo
    echo "| suite | case | view | |"
    echo "| --- | --- | --- | --- |"
    grep -v '|passed$' "$rows" | sort | sed -E 's/\|/ | /g; s/^/| /; s/$/ |/'
} > "$card"
echo "written: $card"
! grep -q '|failed$' "$rows"

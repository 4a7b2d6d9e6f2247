#!/bin/sh
# What the guests of ../guest.sh run, in the host's root, beside what is tested (/mnt). Each line of
# `guest: ok`, `guest: FAILED` or `guest: skipped` is a result; a failure's last words are before it.
set -u
suite=/tmp/suite
python=/usr/bin/python3
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/tmp/gitconfig GIT_TERMINAL_PROMPT=0
printf '[user]\nname = guest\nemail = guest@localhost\n[safe]\ndirectory = *\n[gc]\nauto = 0\n' >$GIT_CONFIG_GLOBAL

# step LIMIT NAME COMMAND...
step() {
    limit=$1 name=$2
    shift 2
    begun=$(date +%s)
    # (A function is a command, too: `timeout` wants a program.)
    timeout -k 5 "$limit" "$0" "$@" >/tmp/log 2>&1
    code=$?
    took=$(($(date +%s) - begun))
    if [ $code = 0 ]; then
        echo "guest: ok $name ($took s)"
    else
        tail -n 40 /tmp/log | sed 's/^/    /'
        [ $code != 124 ] || echo "    it took more than $limit s"
        echo "guest: FAILED $name ($took s, exit $code)"
    fi
}
# with PROGRAMS PACKAGE LIMIT NAME COMMAND...: what is missing is said, and is no failure.
with() {
    for program in $1; do
        command -v "$program" >/dev/null || {
            echo "guest: skipped $4: $program is not installed ($2)"
            return
        }
    done
    shift 2
    step "$@"
}
want() { case " $suites " in *" $1 "* | *" all "*) ;; *) false ;; esac; }

# ---- One guest ----

# fsx CONFIG SEED OPERATIONS DIR
fsx() {
    mkdir -p "$4"
    cd "$4" || exit 1
    RUST_BACKTRACE=0 $suite/fsx -f "$suite/fsx-$1.toml" -S "$2" -N "$3" -P /tmp "fsx-$1-$2$role" || exit 1
    rm -f "fsx-$1-$2$role"*
}

# Cases of pjdfstest that cannot pass here, each with its reason: `NAME reason`, for this back end.
limits() {
    sed -n "s/^$backend: //p; s/^all: //p" $suite/limits
}

# pjdfstest CONFIG [PATTERN]
pjdfstest() {
    mkdir -p /mnt/p /tmp/second
    chmod 777 /mnt/p /tmp/second
    cd /mnt/p || exit 1
    RUST_BACKTRACE=0 $suite/pjdfstest -c "$suite/$1.toml" -p /mnt/p -s /tmp/second ${2:+"$2"} >/tmp/pjdfstest 2>&1
    # Cases that remount run by themselves: nobody may have files open then.
    grep -q '^Summary: ' /tmp/pjdfstest || { tail -n 20 /tmp/pjdfstest; exit 1; }
    limits | cut -d ' ' -f 1 >/tmp/limits
    failed=$(sed -nE 's/^([a-z_0-9:]+) +FAILED$/\1/p' /tmp/pjdfstest | grep -vxF -f /tmp/limits)
    if [ "$1" = pjdfstest ]; then
        failed=$(echo "$failed" | grep -v '::erofs_')
        for name in $(sed -n "s/^$backend: \([^ ]*\).*/\1/p" $suite/limits); do
            ! grep -qE "^$name +ok\$" /tmp/pjdfstest || echo "guest: note: $name passes, and is in the list of what cannot" >/dev/console
        done
    fi
    grep '^Summary: ' /tmp/pjdfstest | sed 's/^/guest: note: pjdfstest: /' >/dev/console
    [ -n "$failed" ] || return 0
    # Each with what it says, which is behind it.
    for name in $failed; do
        sed -nE "/^$name +FAILED$/,/^[a-z_0-9:]+ +(ok|skipped|FAILED)$/p" /tmp/pjdfstest | head -n 12
    done
    exit 1
}

# fio ENGINE
verify() {
    mkdir -p /mnt/fio
    fio --name="$1" --directory=/mnt/fio --ioengine="$1" --rw=randwrite --bs=1k-16k --size=8m --thread \
        --verify=crc32c --do_verify=1 --verify_fatal=1 --iodepth=4 --end_fsync=1 || exit 1
    rm -rf /mnt/fio
}

# Transactions in each mode of the journal give what they give in memory.
sql() {
    for mode in delete truncate persist wal; do
        echo "PRAGMA journal_mode=$mode; PRAGMA synchronous=FULL;"
        echo "CREATE TABLE t_$mode (i INTEGER PRIMARY KEY, s TEXT); CREATE INDEX x_$mode ON t_$mode (s);"
        for n in 1 2 3 4; do
            echo "BEGIN; INSERT INTO t_$mode (s) WITH RECURSIVE c(i) AS (VALUES(1) UNION ALL SELECT i+1 FROM c WHERE i<100)" \
                "SELECT printf('%0200d', i * $n) FROM c; COMMIT;"
        done
        echo "BEGIN; DELETE FROM t_$mode; ROLLBACK; UPDATE t_$mode SET s = s || 'x' WHERE i % 3 = 0; DELETE FROM t_$mode WHERE i % 7 = 0;"
    done
    echo "VACUUM; PRAGMA integrity_check;"
}
sqlite() {
    mkdir -p /mnt/sqlite
    sql >/tmp/sql
    for at in /mnt/sqlite /tmp; do
        rm -f $at/db*
        sqlite3 -bail $at/db </tmp/sql >/tmp/said || exit 1
        [ "$(tail -n 1 /tmp/said)" = ok ] || { cat /tmp/said; exit 1; }
        sqlite3 $at/db .dump >/tmp/dump-"$(basename $at)" || exit 1
    done
    cmp /tmp/dump-sqlite /tmp/dump-tmp || exit 1
}
# Two processes at once, with locks; then a writer that is killed.
sqlite_shared() {
    mkdir -p /mnt/sqlite
    cd /mnt/sqlite || exit 1
    for mode in delete wal; do
        sqlite3 shared-$mode "PRAGMA journal_mode=$mode; CREATE TABLE t (who INT, n INT);" || exit 1
        $python $suite/rows.py shared-$mode 1 25 & one=$!
        $python $suite/rows.py shared-$mode 2 25 || exit 1
        wait $one || exit 1
        $python $suite/rows.py shared-$mode 3 100000 & one=$!
        sleep 8
        kill -9 $one
        [ "$(sqlite3 shared-$mode "SELECT count(*) FROM t WHERE who < 3; PRAGMA integrity_check;")" = "50
ok" ] || { echo "in mode $mode: $(sqlite3 shared-$mode 'SELECT who, count(*) FROM t GROUP BY who; PRAGMA integrity_check')"; exit 1; }
    done
}

whole() { git fsck --full --strict 2>&1 | { ! grep -v '^dangling\|^notice'; }; }
# git DIR: a history with a branch and a merge, cloned, packed and checked.
repository() {
    mkdir -p "$1"
    cd "$1" || exit 1
    rm -rf work clone.git
    git init -q -b main work && cd work || exit 1
    tar -xf $suite/source.tar && git add -A && git commit -q -m one || exit 1
    git checkout -q -b side && echo side >side && git add side && git commit -q -m side || exit 1
    git checkout -q main && git mv source/run moved && git commit -q -m moved || exit 1
    git merge -q -m merged side || exit 1
    [ -z "$(git status --porcelain)" ] || { git status; exit 1; }
    whole || exit 1
    git gc -q --prune=now && whole || exit 1
    git clone -q --no-local --bare . ../clone.git && cd ../clone.git && whole || exit 1
    git archive HEAD moved | tar -x -C /tmp && tar -xf $suite/source.tar -C /tmp && diff -r /tmp/moved /tmp/source/run || exit 1
    rm -rf /tmp/moved /tmp/source
}

# The same bytes come out of a build here as of one in memory, and what was built runs from here.
build() {
    for at in /mnt/build /tmp/build; do
        rm -rf $at && mkdir $at && cd $at || exit 1
        tar -xf $suite/source.tar && cp $suite/build.mk Makefile || exit 1
        make -s -j 2 || exit 1
    done
    cmp /mnt/build/all.a /tmp/build/all.a && cmp /mnt/build/sum /tmp/build/sum || exit 1
    [ "$(/mnt/build/sum </mnt/build/all.a)" = "$(/tmp/build/sum </tmp/build/all.a)" ] || exit 1
    cd /mnt/build && make -s -q || { echo "make would build it again"; exit 1; }
    rm -rf /mnt/build /tmp/build
}

# ---- Two guests on one volume ----

other() { if [ "$role" = one ]; then echo two; else echo one; fi; }
# Waits for the other guest at this point. What it uses is what is tested.
meet() {
    : >"/mnt/meet/$1-$role"
    until [ -e "/mnt/meet/$1-$(other)" ]; do sleep 0.2; done
}
# Both append lines to one file, by the kernel's O_APPEND: none is lost, none is torn.
appends() {
    meet append
    $python $suite/pair.py append /mnt/log "$role" 1000 || exit 1
    meet appended
    $python $suite/pair.py appended /mnt/log 1000
}
# counter KIND: both add to one number, under a lock.
counter() {
    meet "counter-$1"
    $python $suite/pair.py "$1" "/mnt/counter-$1" 300 || exit 1
    meet "counted-$1"
    [ "$(cat "/mnt/counter-$1")" = 600 ] || { echo "$(cat "/mnt/counter-$1") of 600"; exit 1; }
}
# One writes, the other reads what it was told of, at once: in place, longer, shorter, and by names that change.
compares() {
    meet compare
    $python $suite/pair.py compare /mnt "$role" 200
}
both_fsx() {
    meet "fsx-$1"
    fsx "$1" "$2" 3000 /mnt/both
}
both_sqlite() {
    cd /mnt || exit 1
    [ "$role" = two ] || sqlite3 shared "CREATE TABLE t (who INT, n INT);" || exit 1
    meet sqlite
    $python $suite/rows.py shared "$([ "$role" = one ] && echo 1 || echo 2)" 20 || exit 1
    meet sqlited
    [ "$(sqlite3 shared "SELECT count(*) FROM t; PRAGMA integrity_check;")" = "40
ok" ] || { sqlite3 shared 'SELECT who, count(*) FROM t GROUP BY who; PRAGMA integrity_check'; exit 1; }
}
# What one makes the other checks, and goes on with.
both_git() {
    [ "$role" = two ] || repository /mnt/git || exit 1
    meet made
    cd /mnt/git || exit 1
    if [ "$role" = two ]; then
        (cd clone.git && whole) && cd work && whole || exit 1
        [ -z "$(git status --porcelain)" ] || { git status; exit 1; }
        echo two >two && git add two && git commit -q -m two && git push -q ../clone.git main || exit 1
    fi
    meet committed
    [ "$role" = one ] || return 0
    cd clone.git && whole && [ "$(git log -1 --format=%s)" = two ] && cd ../work || exit 1
    [ -z "$(git status --porcelain)" ] && [ "$(cat two)" = two ] && whole
}

# One step of the above, as a program.
[ $# = 0 ] || { "$@"; exit; }

if [ -n "$role" ]; then
    mkdir -p /mnt/meet /mnt/both
    step 120 meet meet begin
    ! want fsx || for config in calls mapped; do step 300 "fsx-$config" both_fsx $config 7; done
    ! want append || step 300 append appends
    ! want lock || for kind in flock fcntl; do step 300 "lock-$kind" counter $kind; done
    ! want compare || step 300 compare compares
    ! want sqlite || with sqlite3 "apt-get install sqlite3" 300 sqlite both_sqlite
    ! want git || with git "apt-get install git" 400 git both_git
    step 120 end meet end
    exit
fi
! want fsx || for config in calls mapped; do for seed in 1 2; do
    step 300 "fsx-$config-$seed" fsx $config $seed 5000 /mnt
done; done
! want pjdfstest || {
    step 500 pjdfstest pjdfstest pjdfstest
    step 300 pjdfstest-readonly pjdfstest readonly erofs
}
! want fio || for engine in psync mmap libaio io_uring; do
    with fio "apt-get install fio" 200 "fio-$engine" verify $engine
done
! want sqlite || {
    with sqlite3 "apt-get install sqlite3" 300 sqlite sqlite
    with sqlite3 "apt-get install sqlite3" 300 sqlite-shared sqlite_shared
}
! want git || with git "apt-get install git" 300 git repository /mnt/git
! want build || with "gcc make" "apt-get install gcc make" 400 build build

#!/bin/sh
# PostgreSQL with its data directory in DIR/pg: pgbench, kill -9 of the whole server in the middle, recovery, and
# the books must balance, with every transaction in them that a client was told of.
# Exit 3: PostgreSQL is not installed here. Usage: scripts/suites/pgbench.sh DIR SCRATCH
set -eu
bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)
if [ -z "$bin" ] || [ ! -x "$bin/initdb" ] || ! id postgres >/dev/null 2>&1; then
    echo "skipped: PostgreSQL is not installed (apt-get install postgresql)"
    exit 3
fi
dir=$1/pg
scratch=$2/pg
port=$((20000 + $$ % 10000))
rm -rf "$scratch"
mkdir -p "$dir" "$scratch"
chown postgres "$dir" "$scratch"
chmod 700 "$dir"
as() { setpriv --reuid=postgres --regid=postgres --init-groups env -u LC_ALL LC_ALL=C "$@"; }
sql() { as "$bin/psql" -h "$scratch" -p "$port" -d postgres -Atqc "$1"; }
start() {
    as "$bin/pg_ctl" -D "$dir" -l "$scratch/log" -w -t 60 \
        -o "-p $port -k $scratch -c listen_addresses='' -c shared_buffers=16MB -c fsync=on" start >/dev/null
}
trap 'as "$bin/pg_ctl" -D "$dir" -m immediate stop >/dev/null 2>&1 || true' EXIT
cd "$scratch"
as "$bin/initdb" -D "$dir" -A trust -N >"$scratch/initdb" 2>&1
start
as "$bin/pgbench" -h "$scratch" -p "$port" -i -q -s 1 postgres >"$scratch/fill" 2>&1
# Each transaction that a client was told of is a line of its log.
as "$bin/pgbench" -h "$scratch" -p "$port" -c 4 -T 6 -l --log-prefix="$scratch/told" postgres \
    >"$scratch/load" 2>&1 &
load=$!
sleep 3
master=$(head -1 "$dir/postmaster.pid")
# shellcheck disable=SC2046  # a list of processes
kill -9 "$master" $(ps -o pid= --ppid "$master") 2>/dev/null || true
wait "$load" || true
told=$(cat "$scratch"/told.* | wc -l)
# A zombie that nobody has waited for would count as a running server.
rm -f "$dir/postmaster.pid" "$scratch"/.s.PGSQL.*
start
books=$(sql "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)
    and (select sum(tbalance) from pgbench_tellers) = (select sum(delta) from pgbench_history)
    and (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history)")
kept=$(sql "select count(*) from pgbench_history")
echo "told of $told transactions, $kept are there, books balance: $books"
[ "$books" = t ] && [ "$told" -gt 10 ] && [ "$kept" -ge "$told" ]
as "$bin/pgbench" -h "$scratch" -p "$port" -c 4 -T 2 postgres | grep '^tps'
sql "create extension if not exists amcheck" 2>/dev/null &&
    sql "select bt_index_check(c.oid, true) from pg_class c join pg_am a on a.oid = c.relam
        where a.amname = 'btree' and c.relname like 'pgbench%'" >/dev/null
as "$bin/pg_ctl" -D "$dir" -m fast stop >/dev/null

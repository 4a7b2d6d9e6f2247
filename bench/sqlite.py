"""One synchronous WAL transaction a row; prints how many a second. Knows nothing of Corbel.

Usage: sqlite.py DATABASE COUNT        write COUNT rows, each in a transaction of its own
       sqlite.py DATABASE follow SECS  the same for SECS seconds, saying each row acknowledged
       sqlite.py DATABASE check        count the rows, check the database
"""
import json
import sqlite3
import sys
import time


def connect(path):
    db = sqlite3.connect(path, isolation_level=None, timeout=30)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, body TEXT NOT NULL)")
    return db


def write(db, row):
    db.execute("INSERT INTO rows VALUES (?, ?)", (row, "row %d %s" % (row, "x" * 100)))


def last(db):
    return db.execute("SELECT coalesce(max(id), 0) FROM rows").fetchone()[0]


def bench(path, count):
    db = connect(path)
    first = last(db) + 1
    samples = []
    begin = time.perf_counter()
    for row in range(first, first + count):
        start = time.perf_counter()
        write(db, row)
        samples.append(time.perf_counter() - start)
    took = time.perf_counter() - begin
    samples.sort()
    print(json.dumps({
        "tx_per_s": count / took,
        "p50_us": samples[count // 2] * 1e6,
        "p99_us": samples[count - 1 - count // 100] * 1e6,
    }))


def follow(path, seconds):
    db = connect(path)
    row = last(db)
    print("start", row, time.monotonic_ns(), flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        row += 1
        write(db, row)
        print(row, time.monotonic_ns(), flush=True)


def check(path):
    db = connect(path)
    verdict = db.execute("PRAGMA integrity_check").fetchone()[0]
    rows = db.execute("SELECT count(*) FROM rows").fetchone()[0]
    print(json.dumps({"integrity": verdict, "rows": rows, "last": last(db)}))


if sys.argv[2] == "check":
    check(sys.argv[1])
elif sys.argv[2] == "follow":
    follow(sys.argv[1], float(sys.argv[3]))
else:
    bench(sys.argv[1], int(sys.argv[2]))

#!/usr/bin/python3
"""LevelDB in DIR/level: a writer that syncs every tenth batch is killed with -9 again and again; what it was told
to be durable must be there after each opening, whole, and nothing else. Exit 3: plyvel is not installed.
Usage: leveldb.py DIR"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

try:
    import plyvel
except ImportError:
    print("skipped: plyvel is not installed (apt-get install python3-plyvel)")
    sys.exit(3)

BATCH, ROUNDS = 20, 6


def value(number, part):
    return b"%08d-%02d-" % (number, part) + b"x" * (number % 300)


def write(path):
    """Batches of records; says which numbers are durable."""
    db = plyvel.DB(path, create_if_missing=True, write_buffer_size=64 << 10)
    last = db.get(b"last")
    number = int(last) + 1 if last else 0
    while True:
        with db.write_batch(sync=number % 10 == 0) as batch:
            for part in range(BATCH):
                batch.put(b"%08d-%02d" % (number, part), value(number, part))
            batch.put(b"last", b"%d" % number)
        if number % 10 == 0:
            print(number, flush=True)
        number += 1


def check(path, durable):
    """Every batch up to the last one is whole, and the last one is not before the durable one."""
    db = plyvel.DB(path, paranoid_checks=True)
    last = db.get(b"last")
    last = int(last) if last else -1
    assert last >= durable, f"{durable} was durable, the last one is {last}"
    found = iter(db.iterator(stop=b"last", verify_checksums=True))
    for number in range(last + 1):
        for part in range(BATCH):
            key, got = next(found)
            assert key == b"%08d-%02d" % (number, part), (key, number, part)
            assert got == value(number, part), key
    assert next(found, None) is None, "records after the last one"
    db.close()
    return last


def main():
    path = os.path.join(sys.argv[1], "level")
    if len(sys.argv) > 2:
        write(path)
    shutil.rmtree(path, ignore_errors=True)
    durable = -1
    for _ in range(ROUNDS):
        with subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1], "write"], stdout=subprocess.PIPE) as writer:
            time.sleep(random.uniform(0.4, 1.2))
            writer.send_signal(signal.SIGKILL)
            said = writer.stdout.read().split()
        durable = max([durable] + [int(n) for n in said])
        last = check(path, durable)
        print(f"durable {durable}, there {last}")
    assert durable > 50, "hardly anything was written"


main()

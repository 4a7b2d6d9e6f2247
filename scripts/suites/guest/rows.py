"""Adds COUNT rows to a table of FILE, each in a transaction of its own, beside others who do. Usage: rows.py FILE WHO COUNT"""

import sqlite3
import sys

path, who, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
db = sqlite3.connect(path, timeout=120, isolation_level=None)
for n in range(count):
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO t VALUES (?, ?)", (who, n))
    db.execute("COMMIT")
db.close()

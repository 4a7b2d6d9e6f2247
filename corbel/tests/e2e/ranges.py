"""One of several processes that write and read blocks of one file (argument 1) at once, each its own and now and then those of others.

Beside it, in plain memory (argument 2), stands for each block how far its writers have come: the number that was written last when a
write began, and when one had returned. What a read gives must lie between what had returned before it began, and what had begun when it
returned; and all of a block is of one write.
"""

import fcntl
import mmap
import os
import random
import sys
import time

BLOCK = 4096
path, truth, number, count, seconds, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
mode = sys.argv[7] if len(sys.argv) > 7 else "all"

draw = random.Random(seed * 1000 + number)
book = os.open(truth, os.O_RDWR)
size = os.fstat(book).st_size
counts = memoryview(mmap.mmap(book, size)).cast("Q")
blocks = size // 16
file = os.open(path, os.O_RDWR)
own = [b for b in range(blocks) if b // 4 % count == number]
done = {"writes": 0, "reads": 0, "others": 0, "stats": 0, "syncs": 0}


def lock(b):
    """Two processes never write one block at once: else the last to return says nothing of what stands there."""
    fcntl.lockf(book, fcntl.LOCK_EX, 16, b * 16)


def unlock(b):
    fcntl.lockf(book, fcntl.LOCK_UN, 16, b * 16)


def write(first, many):
    for b in range(first, first + many):
        lock(b)
    values = [counts[2 * b] + 1 for b in range(first, first + many)]
    for i, value in enumerate(values):
        counts[2 * (first + i)] = value
    data = b"".join(value.to_bytes(8, "little") * (BLOCK // 8) for value in values)
    # Some writes end in the middle of a block: the rest of it is another one of the same value.
    cut = draw.randrange(1, 512) * 8 if many == 1 and draw.random() < 0.1 else 0
    if cut:
        value = values[0].to_bytes(8, "little")
        assert os.pwrite(file, value * (cut // 8), first * BLOCK) == cut
        assert os.pwrite(file, value * ((BLOCK - cut) // 8), first * BLOCK + cut) == BLOCK - cut
    else:
        assert os.pwrite(file, data, first * BLOCK) == len(data)
    for i, value in enumerate(values):
        counts[2 * (first + i) + 1] = value
    for b in range(first, first + many):
        unlock(b)


def read(first, many):
    least = [counts[2 * b + 1] for b in range(first, first + many)]
    data = os.pread(file, many * BLOCK, first * BLOCK)
    most = [counts[2 * b] for b in range(first, first + many)]
    assert len(data) == many * BLOCK, f"read {len(data)} bytes of block {first}"
    for i in range(many):
        words = memoryview(data)[i * BLOCK : (i + 1) * BLOCK].cast("Q")
        seen = {words[0], words[511], words[draw.randrange(512)]}
        # (Of a block that is written in two steps both may be there meanwhile.)
        low, high = min(seen), max(seen)
        if not least[i] <= low <= high <= most[i]:
            sys.exit(f"process {number}: block {first + i} has {low} to {high}, not {least[i]} to {most[i]}")


end = time.monotonic() + seconds
while time.monotonic() < end:
    what = draw.random()
    b = draw.choice(own)
    if what < 0.60:
        many = draw.randrange(1, 4 - b % 4 + 1)
        write(b, many)
        done["writes"] += 1
    elif what < 0.90:
        read(b, draw.randrange(1, 4 - b % 4 + 1))
        done["reads"] += 1
    elif mode == "own":
        continue
    elif what < 0.96:
        other = draw.randrange(blocks)
        write(other, 1) if draw.random() < 0.5 else read(other, 1)
        done["others"] += 1
    elif what < 0.98:
        assert os.fstat(file).st_size == blocks * BLOCK
        done["stats"] += 1
    else:
        os.fsync(file)
        done["syncs"] += 1
os.fsync(file)
print(" ".join(f"{name} {n}" for name, n in done.items()))

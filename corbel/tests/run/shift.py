# Random writes, truncations, holes, COLLAPSE_RANGE and INSERT_RANGE on a file, against a model in
# memory. Arguments: file, seed, and "mapped" for a file that is mapped all the time. Prints the sum of the content.
import ctypes
import hashlib
import mmap
import os
import random
import sys

BLOCK = 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def fallocate(fd, mode, at, n):
    return ctypes.get_errno() if libc.fallocate(fd, mode, at, n) < 0 else 0


name, rnd = sys.argv[1], random.Random(int(sys.argv[2]))
fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
model = bytearray()
mapped = None
if sys.argv[3:] == ["mapped"]:
    model.extend(b"m" * BLOCK)
    os.write(fd, model)
    mapped = mmap.mmap(fd, BLOCK)
moved = 0
for step in range(400):
    kind = rnd.randrange(8)
    at, n = rnd.randrange(60000), rnd.randrange(1, 20000)
    if kind <= 2:
        data = bytes([rnd.randrange(256)]) * n
        assert os.pwrite(fd, data, at) == n
        model.extend(bytes(max(0, at + n - len(model))))
        model[at : at + n] = data
    elif kind == 3:
        os.ftruncate(fd, at)
        model = model[:at].ljust(at, b"\0")
    elif kind in (4, 5):
        insert = kind == 4
        if rnd.random() > 0.1:
            at, n = at // BLOCK * BLOCK, max(BLOCK, n // BLOCK * BLOCK)
        error = fallocate(fd, 32 if insert else 8, at, n)
        last = at if insert else at + n
        want = 22 if at % BLOCK or n % BLOCK or last >= len(model) else 0
        assert error == want, (step, error, want, at, n, len(model), insert)
        if not error:
            moved += 1
            if insert:
                model[at:at] = bytes(n)
            else:
                del model[at : at + n]
    elif kind == 6:
        mode = rnd.choice([1 | 2, 16, 1 | 16])
        assert fallocate(fd, mode, at, n) == 0, step
        if mode == 16:
            model.extend(bytes(max(0, at + n - len(model))))
        end = min(at + n, len(model))
        model[at:end] = bytes(max(0, end - at))
    elif rnd.random() < 0.3:
        os.fsync(fd)
    size = os.fstat(fd).st_size
    assert size == len(model), (step, kind, size, len(model))
    assert os.pread(fd, size + 10, 0) == model, (step, kind)
    if mapped and size:
        assert mapped[: min(size, BLOCK)] == model[:BLOCK], (step, kind)
        mapped[0] = model[0] = step % 256
assert moved > 40, moved
# Each alone, and of what is no regular file.
assert fallocate(fd, 8 | 1, 0, BLOCK) in (22, 95)
assert fallocate(fd, 8 | 32, 0, BLOCK) in (22, 95)
os.ftruncate(fd, 1 << 43)
assert fallocate(fd, 32, 0, 1 << 43) in (0, 27)
assert fallocate(fd, 32, 0, 1 << 44) == 27, "beyond the largest size"
os.ftruncate(fd, 0)
# Blocks go and come: whole ones that held data, and none for the hole.
os.pwrite(fd, b"x" * 8 * BLOCK, 0)
os.fsync(fd)
before = os.fstat(fd).st_blocks
assert fallocate(fd, 8, BLOCK, 2 * BLOCK) == 0
assert os.fstat(fd).st_blocks == before - 16, os.fstat(fd).st_blocks
assert fallocate(fd, 32, BLOCK, 10 * BLOCK) == 0
assert os.fstat(fd).st_blocks == before - 16
assert os.lseek(fd, 0, os.SEEK_HOLE) == BLOCK and os.lseek(fd, BLOCK, os.SEEK_DATA) == 11 * BLOCK
os.pwrite(fd, model, 0)
os.ftruncate(fd, len(model))
os.close(fd)
print(hashlib.md5(bytes(model)).hexdigest())

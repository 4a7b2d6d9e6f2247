# What is done beside the kernel to a file that it has: a clone, a range put in, and an append. The mapped bytes are in it, and
# nobody has asked the mount for an fsync, which tells of a loss once and would have told us. Argument: the mount's statistics.
import ctypes
import fcntl
import mmap
import os
import sys

BLOCK = 4096
FICLONE = 0x40049409
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def fsyncs():
    with open(sys.argv[1]) as stats:
        return [line for line in stats if line.startswith("fuse_fsync_total ")]


fd = os.open("mapped", os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, b"w" * 2 * BLOCK)
mapped = mmap.mmap(fd, BLOCK)
before = fsyncs()
mapped[:4] = b"one!"
clone = os.open("clone", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.ioctl(clone, FICLONE, fd)
assert os.pread(clone, 8, 0) == b"one!wwww", os.pread(clone, 8, 0)
mapped[:4] = b"two!"
assert libc.fallocate(fd, 32, BLOCK, BLOCK) == 0, ctypes.get_errno()
mapped[:4] = b"more"
assert os.pwritev(fd, [b"end"], 0, os.RWF_APPEND) == 3
want = b"more".ljust(BLOCK, b"w") + bytes(BLOCK) + b"w" * BLOCK + b"end"
assert os.pread(fd, 4 * BLOCK, 0) == want
assert fsyncs() == before, (before, fsyncs())

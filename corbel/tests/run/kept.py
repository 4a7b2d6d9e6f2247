# Makes a name in a directory that the kernel has open, has it made durable through that, and ends the service of the node at
# once. Usage: kept.py SERVICE NAME
import ctypes, os, sys, time

libc = ctypes.CDLL(None, use_errno=True)
OPENAT2, NO_MAGICLINKS = 437, 2


class How(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


# What resolves specially is the kernel's.
how = How(os.O_RDONLY | os.O_DIRECTORY, 0, NO_MAGICLINKS)
fd = libc.syscall(OPENAT2, -100, b".", ctypes.byref(how), ctypes.sizeof(how))
assert fd >= 0, os.strerror(ctypes.get_errno())
time.sleep(0.3)
os.mkdir(sys.argv[2])
os.fsync(fd)
os.kill(int(sys.argv[1]), 9)
time.sleep(2)

# Limits, ranges, space and places; every line is the same on any file system of Linux.
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import struct
import time

libc = ctypes.CDLL(None, use_errno=True)
FALLOCATE, COPY, SENDFILE, WRITEV, FADVISE, FCHMODAT2 = 285, 326, 40, 20, 221, 452
NAME_TO_HANDLE_AT, OPEN_BY_HANDLE_AT = 303, 304
LAST = 2**63 - 1


def attempt(f, *args, **kwargs):
    try:
        return f(*args, **kwargs)
    except OSError as e:
        return errno.errorcode[e.errno]


def call(number, *args):
    args = [ctypes.c_char_p(a.encode()) if isinstance(a, str) else ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    ret = libc.syscall(ctypes.c_long(number), *args)
    return errno.errorcode[ctypes.get_errno()] if ret < 0 else ret


def make(name, content=b""):
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    return fd


def copy(source, at, target, to, length):
    at, to = ctypes.c_long(at), ctypes.c_long(to)
    return call(COPY, source, ctypes.byref(at), target, ctypes.byref(to), length, 0)


def apart(f):
    pid = os.fork()
    if pid == 0:
        f()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else "ended"


# No file grows beyond the process's limit.
def limited(ignore):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN if ignore else signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
    fd = make("limited")
    print(os.pwrite(fd, b"x" * 8000, 9000), os.pwrite(fd, b"", 20000), os.writev(fd, [b"x" * 6000] * 2), os.fstat(fd).st_size, flush=True)
    print(attempt(os.write, fd, b"x"), attempt(os.ftruncate, fd, 10001), attempt(os.truncate, "limited", 20000), flush=True)
    print(call(FALLOCATE, fd, 0, 9000, 2000), os.fstat(fd).st_size)
    source = make("source", b"s" * 9000)
    print(copy(source, 0, fd, 5000, 9000), copy(source, 0, fd, 10000, 10), os.fstat(fd).st_size)
    ends = os.open("limited", os.O_WRONLY | os.O_APPEND)
    print(attempt(os.write, ends, b"x"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(os.write(ends, b"x"), os.fstat(fd).st_size, flush=True)


print(apart(lambda: limited(True)), apart(lambda: limited(False)))

# Ranges that overlap, end behind the last offset, or begin before the first.
fd = make("f", b"abcde" * 1000)
other = make("g")
print(copy(fd, 0, fd, 500, 1000), copy(fd, 0, fd, 0, 1), copy(fd, 0, fd, 1000, 1000), copy(fd, 4000, fd, 5000, 9999))
print(copy(fd, -1, other, 0, 1), copy(fd, 0, other, -1, 1), copy(fd, 0, other, LAST, 10), copy(fd, 0, other, 0, -1))
print(attempt(os.pread, fd, 1, LAST), attempt(os.pwrite, fd, b"x", LAST), attempt(os.pread, fd, 10, LAST - 5))
print(call(SENDFILE, os.open("g", os.O_WRONLY | os.O_APPEND), fd, 0, 10), call(FADVISE, fd, 0, 0, 9), call(FADVISE, fd, 0, -1, 0))
buffer = ctypes.create_string_buffer(b"v" * 100, 100)
vector = struct.pack("QQQQ", ctypes.addressof(buffer), 100, 0, 100)
print(call(WRITEV, make("v"), ctypes.c_char_p(vector), 2), os.stat("v").st_size)

here = os.open(".", os.O_RDONLY)
print(copy(fd, 0, here, 0, 1), copy(here, 0, fd, 0, 1), copy(fd, 0, os.open("g", os.O_RDONLY), 0, 1))

# Directories are never open for writing; names that end in a slash are of directories.
print(attempt(os.write, here, b"x"), call(FALLOCATE, here, 0, 0, 10), attempt(os.mknod, "no/"))
os.symlink("f", "link")
print(attempt(os.open, "link", os.O_DIRECTORY | os.O_NOFOLLOW), call(FCHMODAT2, -100, "link", 0o600, 0x100))

# Space that is taken is shown at once.
fd = make("sparse")
os.ftruncate(fd, 5 << 30)
os.pwrite(fd, b"x" * 4096, (4 << 30) + 8192)
print("hole", os.fstat(fd).st_blocks, os.stat("sparse").st_blocks)
fd = make("cut")
for gib in (2, 4, 6):
    os.pwrite(fd, b"x" * 4096, gib << 30)
os.ftruncate(fd, 4 << 30)
print("cut", os.fstat(fd).st_blocks)
fd = make("tail")
os.ftruncate(fd, 100)
print("tail", os.fstat(fd).st_blocks, os.pwrite(fd, b"x", 100), os.fstat(fd).st_blocks)
for content in (b"", b"x" * 4096):
    fd = make("reserved", content)
    call(FALLOCATE, fd, 1, 0, 1 << 20)
    before = os.fstat(fd).st_blocks
    os.ftruncate(fd, len(content))
    print("reserved", before, os.fstat(fd).st_blocks)

# A directory is not empty by its size.
print(os.stat(".").st_size > 0, os.fstat(here).st_size > 0)

# A lease is broken by whoever opens the file.
asked = []
signal.signal(signal.SIGIO, lambda *_: asked.append(1))
fd = make("leased")
os.close(fd)
fd = os.open("leased", os.O_RDONLY)
if attempt(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_RDLCK) == 0:
    print(apart(lambda: print(attempt(os.open, "leased", os.O_WRONLY | os.O_NONBLOCK), flush=True)))
    time.sleep(0.1)
    print("asked for", len(asked))
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

# Handles of files.
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
mount = ctypes.c_int()
print(call(NAME_TO_HANDLE_AT, os.open("f", os.O_RDONLY), "", handle, ctypes.byref(mount), 0x1000))
found = call(OPEN_BY_HANDLE_AT, here, handle, os.O_RDONLY)
print(os.fstat(found).st_ino == os.stat("f").st_ino, os.read(found, 5))

# The working directory moves, and goes.
os.makedirs("a/b/c")
os.chdir("a/b/c")
print(os.getcwd().split("/")[-3:])
os.rename("../../../a", "../../../z")
print(os.getcwd().split("/")[-3:])
os.rmdir("../c")
print(attempt(os.getcwd), attempt(os.mkdir, "x"))

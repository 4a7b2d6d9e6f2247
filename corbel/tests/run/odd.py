# Calls at the edges; every line is the same on any file system of Linux.
import ctypes
import errno
import fcntl
import os
import stat
import struct
import time

libc = ctypes.CDLL(None, use_errno=True)


def call(number, *args):
    args = [ctypes.c_char_p(a.encode()) if isinstance(a, str) else ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    ret = libc.syscall(ctypes.c_long(number), *args)
    return errno.errorcode[ctypes.get_errno()] if ret < 0 else ret


MKNOD, FCHDIR, UTIMENSAT, STATX, RENAMEAT2, FACCESSAT2 = 133, 81, 280, 332, 316, 439
SETXATTR, GETXATTR, READLINK, SYNC_FILE_RANGE, TRUNCATE, NEWFSTATAT, FCHOWNAT = 188, 191, 89, 277, 76, 262, 260
buf = ctypes.create_string_buffer(4096)

# Numbers of what is no device mean nothing; links and directories are made otherwise.
for name, mode in (("f", stat.S_IFREG), ("p", stat.S_IFIFO), ("s", stat.S_IFSOCK), ("c", stat.S_IFCHR), ("z", 0)):
    print(name, call(MKNOD, name, mode | 0o640, 0x103), oct(os.stat(name).st_mode), os.stat(name).st_rdev)
print(call(MKNOD, "l", stat.S_IFLNK | 0o777, 0), call(MKNOD, "d", stat.S_IFDIR | 0o777, 0))
os.mkdir("d")
os.symlink("f", "link")

# A file is no place to go to.
fd = os.open("f", os.O_RDWR)
print(call(FCHDIR, fd), os.path.basename(os.getcwd()) != "")

# What is wrong by itself is told before the file is looked for.
times = struct.pack("qqqq", 1, 0, 1, 0)
nothing = struct.pack("qqqq", 1, 0x3FFFFFFE, 1, 0x3FFFFFFE)
bad = struct.pack("qqqq", 1, 10**9, 1, 0)
for t in (times, nothing, bad):
    print([call(UTIMENSAT, -100, name, ctypes.c_char_p(t), flags) for name in ("f", "none") for flags in (0, 4)])
print(call(STATX, -100, "none", 0, 1 << 31, buf), call(STATX, -100, "none", 0x6000, 0, buf), call(STATX, -100, "none", 1, 0, buf))
print(call(RENAMEAT2, -100, "none", -100, "f", 3), call(RENAMEAT2, -100, "none", -100, "f", 8))
print(call(FACCESSAT2, -100, "none", 8, 0), call(FACCESSAT2, -100, "none", 4, 1), call(NEWFSTATAT, -100, "none", buf, 1))
print(call(FCHOWNAT, -100, "none", 0, 0, 2), call(READLINK, "none", buf, 0), call(TRUNCATE, "none", -1))
print([call(SYNC_FILE_RANGE, fd, *args) for args in ((0, 0, 7), (-1, 0, 0), (0, -1, 0), (0, 0, 8))])
print(call(GETXATTR, "f", "user.", buf, 10), call(SETXATTR, "f", "trusted.", "v", 1, 0))
print(call(SETXATTR, "f", "user.a", "v", 1, 3), call(SETXATTR, "f", "user.a", "v", 1, 1), call(SETXATTR, "f", "user.a", "v", 1, 3))
print(fcntl.fcntl(os.open("f", os.O_RDONLY | os.O_NOFOLLOW), fcntl.F_GETFL) & os.O_NOFOLLOW == os.O_NOFOLLOW)

# O_TRUNC marks the times of an empty file, too.
before = os.stat("f").st_mtime_ns
time.sleep(0.03)
os.close(os.open("f", os.O_WRONLY | os.O_TRUNC))
print("truncated", os.stat("f").st_mtime_ns > before)

# Others than the owner may not hide that they read.
os.chmod("f", 0o666)
os.setresuid(-1, 1000, -1)
for flags in (os.O_RDONLY, os.O_RDONLY | os.O_NOATIME):
    try:
        print(os.open("f", flags) > 0)
    except OSError as e:
        print(e.errno)
other = os.open("f", os.O_RDONLY)
try:
    print(fcntl.fcntl(other, fcntl.F_SETFL, os.O_NOATIME))
except OSError as e:
    print(e.errno)
print(call(MKNOD, "f2", stat.S_IFBLK | 0o600, 0x103) in ("EPERM", "EACCES"))

# Locks and watches on a directory.
d = os.open("d", os.O_RDONLY | os.O_DIRECTORY)


def tried(*args):
    try:
        fcntl.fcntl(*args)
        return "done"
    except OSError as e:
        return errno.errorcode[e.errno]


lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
print(tried(d, fcntl.F_NOTIFY, fcntl.DN_MULTISHOT), tried(d, fcntl.F_NOTIFY, fcntl.DN_CREATE), tried(fd, fcntl.F_NOTIFY, fcntl.DN_CREATE))
print(tried(d, fcntl.F_SETLK, lock), tried(d, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)))
os.close(d)

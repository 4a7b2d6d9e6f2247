# What changes of content, owner and identity do to rights; every line is the same on any file system of Linux.
import ctypes
import errno
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
FALLOCATE, UTIMENSAT = 285, 280
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
os.umask(0o022)
os.chmod(".", 0o777)


def attempt(f, *args, **kwargs):
    try:
        return f(*args, **kwargs)
    except OSError as e:
        return errno.errorcode[e.errno]


def call(number, *args):
    ret = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return errno.errorcode[ctypes.get_errno()] if ret < 0 else ret


def as_user(f, groups=()):
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setresgid(1001, 1001, 1001)
            os.setresuid(1001, 1001, 1001)
            f()
        except BaseException as e:
            print("failed", e, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)


def make(name, mode, content=b"x" * 8192):
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, content)
    os.close(fd)
    os.chmod(name, mode)



def changed(then):
    def change():
        fd = os.open("a", os.O_RDWR)
        then(fd)
        os.close(fd)
    return change


CHANGES = {
    "write": changed(lambda fd: os.pwrite(fd, b"y", 1)),
    "nothing": changed(lambda fd: os.pwrite(fd, b"", 1)),
    "cut": lambda: os.truncate("a", 100),
    "cut on opening": lambda: os.close(os.open("a", os.O_RDWR | os.O_TRUNC)),
    "reserve": changed(lambda fd: call(FALLOCATE, fd, 0, 0, 20000)),
    "punch": changed(lambda fd: call(FALLOCATE, fd, 3, 0, 4096)),
    "copy": changed(lambda fd: os.copy_file_range(os.open("b", os.O_RDONLY), fd, 300 << 10)),
}
make("b", 0o644, b"b" * (300 << 10))

# Set-id bits end when somebody else writes; set-group-ID without execution stays with the group's members.
for name, change in CHANGES.items():
    for mode in (0o6666, 0o6676, 0o6766, 0o2666, 0o4755 | 0o022):
        said = []
        for who in (lambda f: f(), as_user, lambda f: as_user(f, [0])):
            make("a", mode)
            who(change)
            said.append(oct(os.stat("a").st_mode & 0o7777))
        print(name, oct(mode), said, flush=True)

# And when a file gets an owner, were it the same.
for mode in (0o6666, 0o6676, 0o6777):
    for owner in ((-1, -1), (0, -1), (1001, 1001)):
        make("a", mode)
        os.chown("a", *owner)
        print("chown", oct(mode), owner, oct(os.stat("a").st_mode), flush=True)

# Capabilities end with any change, whoever makes it.
CHANGES["chown"] = lambda: os.chown("a", -1, 1001)
for name, change in CHANGES.items():
    for who in (lambda f: f(), as_user):
        make("a", 0o777)
        os.chown("a", 1001, 1001)
        os.setxattr("a", "security.capability", CAPABILITY)
        who(change)
        print("capability", name, os.listxattr("a"), flush=True)

# What is open stays open when rights are given up, and the working directory stays.
os.mkdir("private")
os.chmod("private", 0o700)
make("private/secret", 0o600, b"secret")
directory = os.open("private", os.O_RDONLY)
secret = os.open("private/secret", os.O_RDWR)
print(os.read(secret, 2))


def dropped():
    print(os.read(secret, 2), os.pwrite(secret, b"S", 0), os.fstat(secret).st_size)
    print(attempt(os.open, "private/secret", os.O_RDONLY), attempt(os.listdir, directory) == ["secret"])
    print(attempt(os.open, "secret", os.O_RDONLY, dir_fd=directory), os.stat("b").st_size, flush=True)
    pid = os.fork()
    if pid == 0:
        print(os.read(secret, 1), os.stat("b").st_size, attempt(os.mkdir, "mine"), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print(attempt(os.rmdir, "mine"), attempt(os.unlink, "private/secret"), flush=True)


as_user(dropped)
print(os.lseek(secret, 0, 1), os.pread(secret, 10, 0))

# One time alone only the owner sets.
make("w", 0o666)
half = ctypes.c_char_p(struct.pack("4q", 0, 0x3FFFFFFF, 0, 0x3FFFFFFE))
as_user(lambda: print(call(UTIMENSAT, -100, ctypes.c_char_p(b"w"), half, 0), call(UTIMENSAT, -100, ctypes.c_char_p(b"w"), None, 0), flush=True))

# Of files of others not everybody may make second names (as this machine is set).
make("r", 0o644)
make("s", 0o4777)
os.mkfifo("p")
os.chmod("p", 0o666)
as_user(lambda: print([attempt(os.link, n, n + "2") for n in "rswp"], flush=True))
os.mkdir("sticky")
os.chmod("sticky", 0o1777)
make("sticky/f", 0o666)
os.symlink("f", "sticky/l")
as_user(lambda: print([isinstance(attempt(os.open, f"sticky/{n}", os.O_RDWR | how), int) for n in "fl" for how in (0, os.O_CREAT)], flush=True))

# Which error comes first: calls on names of every kind, by root and by somebody else, and on
# descriptors of every kind, with wrong arguments and bad memory. The same on any file system.
import ctypes
import errno
import os
import resource
import shutil
import signal
import stat
import struct

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
room = ctypes.create_string_buffer(65536)
HERE = -100
MAX = 2**63 - 1


def call(number, *args):
    args = [ctypes.c_char_p(a.encode()) if isinstance(a, str) else ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    ret = libc.syscall(ctypes.c_long(number), *args)
    return errno.errorcode[ctypes.get_errno()] if ret < 0 else ret


def pages(count, prot):
    return libc.mmap(None, ctypes.c_size_t(count * 4096), prot, 0x22, -1, ctypes.c_long(0))


BAD = pages(1, 0)
EDGE = pages(2, 3) + 4096
libc.mprotect(ctypes.c_void_p(EDGE), 4096, 0)


def words(*values):
    return struct.pack(f"{len(values)}q", *values)


def iov(*parts):
    return words(*(x for part in parts for x in part))


def tree():
    os.chdir("..")
    shutil.rmtree("t", ignore_errors=True)
    os.mkdir("t", 0o755)
    os.chdir("t")
    for name, mode in (("f", 0o644), ("secret", 0), ("setid", 0o6777), ("hard", 0o644)):
        with open(name, "w") as file:
            file.write("text")
        os.chmod(name, mode)
    os.mkdir("d", 0o755)
    open("d/g", "w").close()
    os.mkdir("all")
    os.mkdir("sticky")
    open("sticky/g", "w").close()
    os.chmod("all", 0o777)
    os.chmod("sticky", 0o1777)
    for to, name in (("f", "l"), ("d", "ld"), ("gone", "dang"), ("loop", "loop")):
        os.symlink(to, name)
    os.mkfifo("p")


def as_somebody(who, what):
    os.setegid(who)
    os.seteuid(who)
    try:
        return what()
    finally:
        os.seteuid(0)
        os.setegid(0)


def opened(*args):
    fd = call(*args)
    if isinstance(fd, int):
        os.close(fd)
        return "opened"
    return fd


O_CREAT, O_EXCL, O_DIRECTORY, O_NOFOLLOW, O_DIRECT, O_NOATIME, O_RW = 0o100, 0o200, 0o200000, 0o400000, 0o40000, 0o1000000, 0o4002
BY_NAME = {
    "creat": lambda p: opened(2, p, O_CREAT | O_RW, 0o640),
    "excl": lambda p: opened(2, p, O_CREAT | O_EXCL | O_RW, 0o640),
    "dir": lambda p: opened(2, p, O_DIRECTORY | O_NOFOLLOW),
    "dircreat": lambda p: opened(2, p, O_DIRECTORY | O_CREAT, 0o600),
    "direct dir": lambda p: opened(2, p, O_DIRECT | O_DIRECTORY),
    "noatime": lambda p: opened(2, p, O_NOATIME | 0o4000),
    "mkdir": lambda p: call(83, p, 0o755),
    "rmdir": lambda p: call(84, p),
    "unlink": lambda p: call(87, p),
    "mknod": lambda p: call(133, p, stat.S_IFCHR | 0o600, 0x103),
    "symlink": lambda p: call(88, "to", p),
    "symlink to nothing": lambda p: call(88, "", p),
    "link to": lambda p: call(86, "f", p),
    "link from": lambda p: call(86, p, "all/new"),
    "rename to": lambda p: call(82, "f", p),
    "rename from": lambda p: call(82, p, "all/new"),
    "rename dir to": lambda p: call(82, "d", p),
    "rename to bad": lambda p: call(82, p, BAD),
    "exchange": lambda p: call(316, HERE, "f", HERE, p, 2),
    "noreplace": lambda p: call(316, HERE, "f", HERE, p, 1),
    "chmod link": lambda p: call(452, HERE, p, 0o700, 0x100),
    "chown to nobody": lambda p: call(92, p, -1, -1),
    "xattr": lambda p: call(188, p, "user.", "v", 1, 0),
    "xattr junk": lambda p: call(188, p, "junk.a", "v", 1, 0),
    "capability": lambda p: call(188, p, "security.capability", "v", 1, 0),
    "utimes": lambda p: call(235, p, words(1, 0, 1, 1000000)),
    "utimensat": lambda p: call(280, HERE, p, words(0, 0x3FFFFFFF, 0, 0x3FFFFFFE), 0),
    "empty path": lambda p: call(439, HERE, p, 4, 0x1000),
    "access": lambda p: call(21, p, 4),
    "exec": lambda p: call(59, p, 0, 0) if p in ("f", "setid", "p") else "",
}
NAMES = "f f/ f/x secret setid d d/ d/g d/new d/. d/.. all all/new sticky/g sticky/new l l/ ld ld/ ld/g dang dang/ loop loop/x p nope nope/ nope/x . ..".split()
NAMES += ["", "n" * 256, "d/" + "n" * 256, "./" * 2048 + "f", BAD, 0, -4096]
os.makedirs("t", exist_ok=True)
os.chdir("t")
for user in (0, 65534):
    for what, do in BY_NAME.items():
        tree()
        for name in NAMES:
            if what == "chown to nobody" and name == "setid" and os.environ.get("VIEW") == "mount":
                # The kernel takes the set-id bits out of the request.
                continue
            said = as_somebody(user, lambda: do(name))
            label = "bad" if name == BAD else name if isinstance(name, int) else name[:20]
            print(user, what, repr(label), said)
            if not isinstance(said, str) or said == "opened":
                seen = sorted((n, oct(os.lstat(n).st_mode)) for n in os.listdir("."))
                print(seen, sorted(os.listdir("all")) if os.path.isdir("all") else "")
                tree()

# A link to what somebody else owns.
tree()
with open("/proc/sys/fs/protected_hardlinks") as file:
    if file.read() == "1\n":
        print(as_somebody(65534, lambda: call(86, "f", "all/new")))

BY_FD = {
    "read": lambda fd: call(0, fd, room, 10),
    "read edge": lambda fd: call(0, fd, EDGE - 3, 10),
    "read bad": lambda fd: call(0, fd, BAD, 10),
    "read far": lambda fd: call(17, fd, room, 10, MAX),
    "write": lambda fd: call(1, fd, room, 10),
    "write edge": lambda fd: call(1, fd, EDGE - 3, 10),
    "write bad": lambda fd: call(18, fd, BAD, 10, 0),
    "write far": lambda fd: call(18, fd, room, 10, MAX - 5),
    "writev bad": lambda fd: call(20, fd, iov((EDGE - 2, 2), (BAD, 4)), 2),
    "writev edge": lambda fd: call(20, fd, iov((EDGE - 2, 2), (EDGE - 2, 5)), 2),
    "writev many": lambda fd: call(20, fd, room, 1025),
    "readv edge": lambda fd: call(19, fd, iov((EDGE - 2, 2), (EDGE - 2, 5)), 2),
    "readv none": lambda fd: call(19, fd, iov(), 0),
    "pwritev2": lambda fd: call(328, fd, iov((EDGE - 2, 2)), 1, 0, 0, -1),
    "fallocate": lambda fd: call(285, fd, 0, 0, 0),
    "fallocate junk": lambda fd: call(285, fd, 2, 0, 10),
    "fadvise": lambda fd: call(221, fd, 0, 0, 6),
    "readahead": lambda fd: call(187, fd, 0, 10),
    "lock": lambda fd: call(72, fd, 6, struct.pack("hhiqqii", 0, 0, 0, MAX, 10, 0, 0)),
    "lock where": lambda fd: call(72, fd, 6, struct.pack("hhiqqii", 0, 9, 0, 0, 10, 0, 0)),
    "owner": lambda fd: call(72, fd, 8, 4000000),
    "signal": lambda fd: (call(72, fd, 10, 10), call(72, fd, 11, 0)),
    "direct": lambda fd: call(72, fd, 4, O_DIRECT),
    "hint": lambda fd: call(72, fd, 1036, words(77)),
    "nonblocking": lambda fd: (call(16, fd, 0x5421, words(1)), call(72, fd, 3, 0)),
    "nonblocking bad": lambda fd: call(16, fd, 0x5421, BAD),
    "copy": lambda fd: call(326, fd, words(0), fd, words(1), 10, 0),
    "copy before": lambda fd: call(326, fd, words(-5), fd, 0, 10, 0),
    "copy flags": lambda fd: call(326, fd, 0, fd, 0, 10, 1),
    "sendfile": lambda fd: call(40, fd, fd, words(-1), 10),
    "mmap": lambda fd: call(9, 0, 0, 1, 2, fd, 0),
    "mmap at": lambda fd: call(9, 0, 4096, 1, 2, fd, 100),
    "mmap far": lambda fd: call(9, 0, 8192, 1, 2, fd, MAX - 4095),
    "mmap down": lambda fd: call(9, 0, 4096, 1, 0x102, fd, 0),
    "futimesat": lambda fd: call(261, fd, 0, 0),
    "in it": lambda fd: call(83 + 175, fd, "made", 0o755),
    "path in it": lambda fd: opened(257, fd, "f", 0o10000000),
    "beneath it": lambda fd: opened(437, fd, "f", words(0, 0, 8), 24),
    "go to it": lambda fd: (call(81, fd), os.chdir(AT))[0],
    "listen": lambda fd: call(50, fd, 1),
    "sendmsg": lambda fd: call(46, fd, BAD, 0),
    "timer": lambda fd: call(287, fd, room),
    "epoll": lambda fd: call(233, fd, 1, 0, room),
    "tee": lambda fd: call(276, fd, fd, 10, 0),
    "handle": lambda fd: call(303, fd, "", room, BAD, 0x8000),
    "lease": lambda fd: call(72, fd, 1024, 1),
}
tree()
AT = os.getcwd()
for what, do in BY_FD.items():
    for kind in ("read", "write", "both", "append", "empty", "dir", "unlinked"):
        flags = {"read": os.O_RDONLY, "write": os.O_WRONLY, "append": os.O_RDWR | os.O_APPEND, "dir": os.O_RDONLY}.get(kind, os.O_RDWR)
        with open("of", "wb") as file:
            file.write(b"" if kind == "empty" else bytes(range(100)))
        with open("other", "wb") as file:
            file.write(b"")
        other = os.open("of", os.O_RDWR)
        fd = os.open("d" if kind == "dir" else "of", flags)
        if kind == "unlinked":
            os.unlink("of")
        said = do(fd)
        size = os.fstat(fd).st_size if kind != "dir" else 0
        at = os.lseek(fd, 0, 1) if kind != "dir" else 0
        print(what, kind, said, size, at, os.path.exists("d/made"))
        os.close(fd)
        os.close(other)
        if os.path.exists("d/made"):
            os.rmdir("d/made")
print(sorted(os.listdir("..")))


def child(what):
    pid = os.fork()
    if pid == 0:
        what()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def say(*what):
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


# Who gives up rights keeps the directory that it is in, though it may no longer find it.
def given_up():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    say(opened(2, "f", 0), opened(2, "secret", 0), opened(2, "all/made", O_CREAT | O_RW, 0o600), opened(257, at, "g", 0))


tree()
os.chdir("d")
os.chmod("..", 0o700)
at = os.open(".", os.O_RDONLY)
os.chdir("..")
print(end="", flush=True)
child(lambda: child(given_up))
os.chmod(".", 0o755)


# As a user of the file system only, and without one power.
def other_user():
    libc.setfsuid(9)
    libc.setfsgid(9)
    say(opened(2, "secret", 0), opened(2, "f", 2), opened(2, "all/fs", O_CREAT | O_RW, 0o600))
    libc.setfsuid(0)
    say(opened(2, "secret", 0), os.stat("all/fs").st_uid)


def powerless():
    header, sets = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    say(call(125, header, sets))
    words = list(struct.unpack("6I", sets.raw))
    words[0] &= ~0b1111
    say(call(126, header, struct.pack("6I", *words)), call(92, "f", 5, 5), opened(2, "all/made", 0))
    os.chdir("all")
    say(opened(2, "../secret", 0), opened(2, "../f", 0))


os.chown("secret", 7, 7)
open("all/made", "w").close()
os.chown("all/made", 7, 7)
os.chmod("all/made", 0)
child(other_user)
child(powerless)


# How far a file may grow, and how many may be open.
def limited():
    seen = []
    signal.signal(signal.SIGXFSZ, lambda *_: seen.append("xfsz"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    fd = os.open("grows", os.O_RDWR | os.O_CREAT)
    say(call(1, fd, room, 600), call(1, fd, room, 600), call(1, fd, room, 600), bool(seen))
    say(call(18, fd, room, 10, 995), call(18, fd, room, 10, 1000), call(20, fd, iov((BAD, 0)), 1), bool(seen))
    say(call(77, fd, 1001), call(77, fd, 1000), call(76, "grows", 2000), call(285, fd, 0, 0, 2000), bool(seen))
    os.lseek(fd, 900, 0)
    say(call(20, fd, iov((EDGE - 64, 64), (EDGE - 64, 64)), 2), call(20, fd, iov((EDGE - 64, 64)), 1), bool(seen))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    child(lambda: call(1, fd, room, 1))
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    fds = []
    while isinstance(fd := call(2, "f", 0), int):
        fds.append(fd)
    said = call(2, "notmade", O_CREAT | O_RW, 0o600), call(2, "grows", 0o1002)
    os.close(fds[-1])
    say(fd, said, os.path.exists("notmade"), os.stat("grows").st_size)


child(limited)


# In a directory that is gone.
def gone():
    os.makedirs("g/one/two")
    os.chdir("g/one/two")
    say(call(84, "../two"), call(79, room, 4096), call(83, "new", 0o755), opened(2, "new", O_CREAT | O_RW, 0o600))
    say(call(86, "../../../f", "new"), call(82, "../../../hard", "new"), call(88, "to", "new"))
    say(call(80, "."), call(80, ".."), os.listdir("."))
    at = os.open("../../d", os.O_RDONLY)
    os.unlink("../../d/g")
    os.rmdir("../../d")
    os.chdir("../..")
    say(call(265, HERE, "f", at, "new", 0), call(264, HERE, "f", at, "new"), opened(257, at, "new", O_CREAT | O_RW, 0o600))


child(gone)

# A private mapping ends where the file does.
fd = os.open("f", os.O_RDWR)
child(lambda: say(ctypes.string_at(libc.mmap(None, ctypes.c_size_t(8192), 1, 2, fd, ctypes.c_long(0)) + 4, 1)))
child(lambda: say(ctypes.string_at(libc.mmap(None, ctypes.c_size_t(8192), 1, 2, fd, ctypes.c_long(0)) + 4096, 1)))
print(sorted(os.listdir(".")))
os.chdir("..")
shutil.rmtree("t")

"""Namespaces: what is mounted, and who somebody is, in them is not what the session knows. In a namespace of mounts of its own."""
import ctypes, os, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWPID, REC_PRIVATE, DETACH = 0x20000, 0x10000000, 0x20000000, 0x44000, 2
SYS_pivot_root = 155
vol, case = sys.argv[1], sys.argv[2]
above = os.path.dirname(os.path.dirname(vol))
os.chdir("/")


def check(ret):
    assert ret == 0, os.strerror(ctypes.get_errno())


def tmpfs(where):
    check(libc.mount(b"t", where.encode(), b"tmpfs", 0, None))


def look(what):
    try:
        os.unlink(f"{vol}/{what}")
        print("removed", what)
    except OSError as e:
        print(what, e.strerror)


def try_all(prepare):
    for name in ("file", "open", "inherited"):
        open(f"{vol}/{name}", "w").write(name)
    fd, out = os.open(f"{vol}/open", os.O_RDWR), os.open(f"{vol}/inherited", os.O_RDWR | os.O_APPEND)
    os.set_inheritable(out, True)
    prepare()
    print("there", os.path.exists(vol), os.path.exists(f"{vol}/file"))
    look("file")
    os.write(fd, b"written")
    print(os.pread(fd, 20, 0))
    if os.path.exists("/bin/sh"):
        print("of a program", os.waitpid(os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", f"echo text >&{out}; test -e {vol}/open; echo $? >&{out}"]), 0)[1])
    print(os.pread(out, 99, 0))


def own():
    check(libc.unshare(NEWNS))
    check(libc.mount(b"n", b"/", None, REC_PRIVATE, None))


def over():
    # The process has been in this namespace from the start, and so has the session.
    tmpfs(above)


def back():
    tmpfs(above)
    os.makedirs(vol, exist_ok=True)
    open(f"{vol}/file", "w").write("another")
    check(libc.umount2(above.encode(), DETACH))


def pivot():
    check(libc.mount(b"n", b"/", None, REC_PRIVATE, None))
    tmpfs("/mnt")
    os.makedirs("/mnt/old")
    check(libc.syscall(SYS_pivot_root, b"/mnt", b"/mnt/old"))
    os.chdir("/")


def by_child(flags):
    # As sandboxes do: the child has the namespaces.
    pid = libc.syscall(56, flags | 17, 0, 0, 0, 0)
    assert pid >= 0
    if pid == 0:
        try:
            check(libc.mount(b"n", b"/", None, REC_PRIVATE, None))
            tmpfs(above)
            print("there", os.path.exists(f"{vol}/file"))
            look("file")
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


if case == "own":
    try_all(lambda: (own(), tmpfs(above)))
elif case == "over":
    try_all(over)
elif case == "relative":
    try_all(lambda: (os.chdir(os.path.dirname(above)), check(libc.mount(b"t", os.path.basename(above).encode(), b"tmpfs", 0, None))))
elif case == "back":
    try_all(back)
elif case == "pivot":
    try_all(pivot)
elif case == "child":
    try_all(lambda: by_child(NEWNS))
elif case == "pids":
    # Writers in two namespaces of processes, at one offset: neither knows the other's number.
    fd = os.open(f"{vol}/shared", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            if number:
                check(libc.unshare(NEWPID))
            pid = os.fork()
            if pid == 0:
                # Each takes longer than one waits before asking whether who writes is alive.
                for _ in range(4):
                    os.write(fd, b"%d" % number * (16 << 20))
                os._exit(0)
            os._exit(os.waitpid(pid, 0)[1] != 0)
        pids.append(pid)
    print([os.waitpid(pid, 0)[1] for pid in pids])
    data = open(f"{vol}/shared", "rb").read()
    print(data.count(b"0"), data.count(b"1"))

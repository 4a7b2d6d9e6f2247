"""What a process has locked of two files after each of many random calls, as another process sees it: a line each, the same on
every file system. `holds.py SEED STEPS`; a program that it executes goes on at STEP with these descriptors."""
import ctypes, fcntl, os, random, struct, subprocess, sys

BYTES, FILES, OPEN_MAX = 12, ("a", "b"), 8
CALLS = "open open lock lock lock lock lock unlock close dup dup2 flock map fork child exec failed write range cloexec dupfd run".split()
MODES = {"rw": os.O_RDWR, "r": os.O_RDONLY, "w": os.O_WRONLY}
libc = ctypes.CDLL(None)


def tells(asked, told):
    """The other process: looks at every byte when it is asked."""
    files = [os.open(name, os.O_RDWR) for name in FILES]

    def bars(fd, byte, kind):
        lock = struct.pack("hhqqi4x", kind, 0, byte, 1, 0)
        return struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, lock))[0] != fcntl.F_UNLCK

    def kind(fd, byte):
        if not bars(fd, byte, fcntl.F_WRLCK):
            return "."
        return "W" if bars(fd, byte, fcntl.F_RDLCK) else "r"

    while os.read(asked, 1):
        said = " ".join("".join(kind(fd, b) for b in range(BYTES)) for fd in files)
        os.write(told, said.encode() + b"\n")


def look():
    os.write(ask, b"x")
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(answer, 100)
    return said.decode().strip()


def tried(call, *args):
    try:
        return call(*args)
    except OSError as e:
        return f"E{e.errno}"


seed, steps = int(sys.argv[1]), int(sys.argv[2])
if len(sys.argv) > 3:
    step, ask, answer = map(int, sys.argv[3:6])
    fds = dict(eval(sys.argv[6]))
else:
    step, fds = 0, {}
    for name in FILES:
        with open(name, "wb") as f:
            f.write(bytes(8192))
    (asked, ask), (answer, told) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(ask)
        os.close(answer)
        tells(asked, told)
        os._exit(0)
    os.close(asked)
    os.close(told)
    os.set_inheritable(ask, True)
    os.set_inheritable(answer, True)

# In the order in which they were opened, since numbers may differ.
rng = random.Random(seed * 1_000_003 + step)


def do(what):
    if what == "open" or not fds:
        name, mode = rng.choice(FILES), rng.choice("rw rw r w".split())
        if len(fds) < OPEN_MAX:
            fd = os.open(name, MODES[mode])
            os.set_inheritable(fd, rng.random() < 0.6)
            fds[fd] = (name, mode)
        return name, mode
    fd = rng.choice(list(fds))
    name, mode = fds[fd]
    start, length = rng.randrange(BYTES), rng.choice([0, 1, 2, 5])
    inherit = rng.random() < 0.6
    said = None
    if what == "lock":
        how = rng.choice([fcntl.LOCK_SH, fcntl.LOCK_EX])
        said = how, start, length, tried(fcntl.lockf, fd, how | fcntl.LOCK_NB, length, start)
    elif what == "unlock":
        said = start, length, tried(fcntl.lockf, fd, fcntl.LOCK_UN, length, start)
    elif what == "close":
        os.close(fd)
        del fds[fd]
    elif what == "range":
        os.closerange(fd, fd + 1)
        del fds[fd]
    elif what == "dup" and len(fds) < OPEN_MAX:
        new = os.dup(fd)
        os.set_inheritable(new, inherit)
        fds[new] = fds[fd]
    elif what == "dupfd" and len(fds) < OPEN_MAX:
        fds[fcntl.fcntl(fd, fcntl.F_DUPFD, 30)] = fds[fd]
    elif what == "dup2":
        over = rng.choice(list(fds))
        said = fds[over]
        if over != fd:
            os.dup2(fd, over, inherit)
            fds[over] = fds[fd]
    elif what == "cloexec":
        os.set_inheritable(fd, inherit)
    elif what == "flock":
        said = tried(fcntl.flock, fd, rng.choice([fcntl.LOCK_SH, fcntl.LOCK_UN]) | fcntl.LOCK_NB)
    elif what == "map" and mode != "w" and rng.random() < 0.3:
        libc.mmap(None, ctypes.c_long(4096), 1, 1, fd, ctypes.c_long(0))
    elif what == "write":
        said = tried(os.write, fd, b"xyz"), os.lseek(fd, 0, 0)
    elif what in ("fork", "child"):
        pid = os.fork()
        if pid == 0:
            if what == "child":
                os.execv("/bin/true", ["true"])
            os.close(fd) if inherit else tried(fcntl.lockf, fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 0)
            os._exit(0)
        os.waitpid(pid, 0)
    elif what == "run":
        subprocess.run(["/bin/true"], close_fds=inherit)
    elif what == "failed":
        said = tried(os.execv, "/no/program", ["x"])
    elif what == "exec":
        stay = [(fd, of) for fd, of in fds.items() if os.get_inheritable(fd)]
        args = [sys.executable, *sys.argv[:3], str(step), str(ask), str(answer), repr(stay)]
        os.execv(sys.executable, args)
    return name, mode, said


print(step, "begins |", look(), flush=True)
while step < steps:
    step += 1
    what = rng.choice(CALLS)
    print(step, what, do(what), "|", look(), flush=True)
os.close(ask)

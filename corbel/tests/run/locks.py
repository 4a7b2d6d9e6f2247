"""File locks between the mounts of three nodes: `locks.py CASE CLUSTER CORBEL`."""

import errno, fcntl, os, signal, struct, subprocess, sys, time

CASE, CLUSTER, CORBEL = sys.argv[1:4]
EX, SH, UN, NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN, fcntl.LOCK_NB
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38
LONG = 20


def mount(node):
    return f"{CLUSTER}/n{node}/mnt"


def opened(node, name="f"):
    return os.open(f"{mount(node)}/{name}", os.O_RDWR | os.O_CREAT, 0o644)


def barred(call, *args):
    try:
        call(*args)
        return False
    except BlockingIOError:
        return True


def posix(fd, how, length=0, start=0):
    fcntl.lockf(fd, how, length, start)


def ofd(fd, kind, start=0, length=0, command=F_OFD_SETLK):
    return fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, 0, start, length, 0))


def getlk(fd, kind, start=0, length=0, command=fcntl.F_GETLK):
    ask = struct.pack("hhqqi4x", kind, 0, start, length, 0)
    return struct.unpack("hhqqi4x", fcntl.fcntl(fd, command, ask))


def within(seconds, done):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "too late"
        time.sleep(0.005)


HOLD = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
fcntl.lockf(fd, fcntl.LOCK_EX, 10, 100)
print("held", flush=True)
time.sleep(100)
"""


def holder(node, hooked=False, name="f"):
    """A process that holds bytes 100 to 109 by fcntl, and the file by flock."""
    os.close(opened(node, name))
    program = [sys.executable, "-c", HOLD, f"{mount(node)}/{name}"]
    if hooked:
        socket = f"{CLUSTER}/n{node}/run/hostd.sock"
        program = [CORBEL, "run", "--mount", mount(node), "--socket", socket, "--"] + program
    child = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


def holds(fd):
    """How many of the holder's two locks bar this one; nothing is left locked."""
    a = barred(posix, fd, SH | NB, 1, 109)
    b = barred(fcntl.flock, fd, SH | NB)
    posix(fd, UN)
    fcntl.flock(fd, UN)
    return a + b


def kinds():
    """What bars what, between two nodes and between the files of one process."""
    a, b, again = opened(1), opened(2), opened(1)
    posix(a, EX | NB, 10, 0)
    assert barred(posix, b, EX | NB, 10, 5) and barred(posix, b, SH | NB, 1, 9)
    assert not barred(posix, b, EX | NB, 10, 10)
    assert not barred(posix, again, EX | NB, 10, 0), "one process, one owner"
    kind, _, start, length, pid = getlk(b, fcntl.F_WRLCK)
    assert (kind, start, length, pid) == (fcntl.F_WRLCK, 0, 10, 0), (kind, start, length, pid)
    assert getlk(b, fcntl.F_WRLCK, 50)[0] == fcntl.F_UNLCK
    assert not barred(fcntl.flock, b, EX | NB), "records and whole files do not meet"
    assert barred(fcntl.flock, a, SH | NB) and barred(fcntl.flock, again, SH | NB)
    fcntl.flock(b, SH | NB)
    assert not barred(fcntl.flock, a, SH | NB) and barred(fcntl.flock, a, EX | NB)
    fcntl.flock(b, UN)
    # An open file is an owner of its own; closing another descriptor does not harm it.
    ofd(a, fcntl.F_WRLCK, 50, 5)
    for other in (b, again):
        assert barred(ofd, other, fcntl.F_RDLCK, 54, 1)
        assert barred(posix, other, SH | NB, 1, 54)
    assert getlk(b, fcntl.F_RDLCK, 54, 1, F_OFD_GETLK)[0] == fcntl.F_WRLCK
    os.close(again)
    assert barred(ofd, b, fcntl.F_RDLCK, 54, 1), "still held"
    assert not barred(posix, b, EX | NB, 10, 0), "any close ends a process's record locks"
    os.close(a)
    within(LONG, lambda: not barred(ofd, b, fcntl.F_RDLCK, 54, 1))


def forked(body):
    """A child that does `body` and ends well if that returns."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(2 * LONG)  # if the parent does not live to end it
        try:
            body()
            os._exit(0)
        except BaseException as e:
            print(e, file=sys.stderr)
            os._exit(1)
    return pid


def ended(pid):
    """Whether the child has ended, well."""
    done, status = os.waitpid(pid, os.WNOHANG)
    assert done == 0 or status == 0, status
    return done != 0


def waiting():
    """Who waits is served when the lock goes, by a close as by an unlock, and hears signals."""
    locks = {
        "flock": lambda fd: fcntl.flock(fd, EX),
        "posix": lambda fd: posix(fd, EX),
        "ofd": lambda fd: ofd(fd, fcntl.F_WRLCK, command=F_OFD_SETLKW),
    }
    for lock in locks.values():
        for close in (False, True):
            a, b = opened(1), opened(1)
            lock(a)
            # What a child inherits would keep the parent's open file alive.
            child = forked(lambda: (os.close(a), lock(opened(2))))
            time.sleep(0.2)
            assert not ended(child)
            if close:
                os.close(a)
            else:
                fcntl.flock(a, UN)
                posix(a, UN)
                ofd(a, fcntl.F_UNLCK)
                os.close(a)
            within(LONG, lambda: ended(child))
            os.close(b)
    # A signal ends the wait, and what others do on the mount goes on meanwhile.
    holding = holder(1)
    b = opened(2)

    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    signal.signal(signal.SIGALRM, ring)
    for wait in (lambda: posix(b, EX), lambda: fcntl.flock(b, EX)):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        try:
            wait()
            raise SystemExit("a lock that is held was given")
        except Alarm:
            assert time.monotonic() - start < LONG
    # A killed waiter leaves nothing behind.
    child = forked(lambda: fcntl.flock(b, EX))
    time.sleep(0.2)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL

    # Many waiters on one mount hold nobody up, and each has its turn.
    def turn():
        fcntl.flock(opened(2), EX)
        with open(f"{mount(2)}/turns", "a") as turns:
            turns.write("x")

    waiters = [forked(turn) for _ in range(30)]
    time.sleep(0.3)
    start = time.monotonic()
    assert os.path.getsize(f"{mount(2)}/f") == 0
    assert time.monotonic() - start < LONG / 2, "the mount answers others"
    holding.kill()
    holding.wait()
    for waiter in waiters:
        within(LONG, lambda: ended(waiter))
    assert os.path.getsize(f"{mount(1)}/turns") == 30


def death():
    """A kill -9 frees, whether the program went through the mount or under `corbel run`."""
    b = opened(2)
    for hooked in (False, True):
        child = holder(1, hooked)
        assert holds(b) == 2, f"hooked {hooked}"
        if hooked:
            # `corbel run` is the parent; what holds the lock is its child.
            inner = subprocess.check_output(["pgrep", "-P", str(child.pid)], text=True).split()
            for pid in inner or [child.pid]:
                os.kill(int(pid), signal.SIGKILL)
        child.kill()
        child.wait()
        within(LONG, lambda: not holds(b))


def deadlock():
    """Two processes on two nodes that wait for each other: one of them is told."""
    def half(node, mine, other):
        fd = opened(node)
        posix(fd, EX, 1, mine)
        open(f"{CLUSTER}/has{mine}", "w").close()
        within(LONG, lambda: os.path.exists(f"{CLUSTER}/has{other}"))
        try:
            posix(fd, EX, 1, other)
        except OSError as e:
            assert e.errno == errno.EDEADLK, e
            open(f"{CLUSTER}/told{mine}", "w").close()

    children = [forked(lambda: half(1, 0, 1)), forked(lambda: half(2, 1, 0))]
    for child in children:
        within(LONG, lambda: ended(child))
    told = [n for n in (0, 1) if os.path.exists(f"{CLUSTER}/told{n}")]
    assert len(told) == 1, told


def failover():
    """The head dies: its own programs' locks go, all others stay, waiters are served."""
    first, second = holder(1), holder(2, name="g")
    f, g = opened(3), opened(3, "g")
    assert holds(f) == 2 and holds(g) == 2
    waiter = forked(lambda: fcntl.flock(opened(3), EX))
    time.sleep(0.2)
    assert not ended(waiter)
    subprocess.run([CORBEL, "cluster", "kill", "1", "--dir", CLUSTER], check=True,
                   stdout=subprocess.DEVNULL)
    within(LONG, lambda: ended(waiter))
    within(LONG, lambda: not holds(f))
    assert holds(g) == 2, "its holder lives, on the new head"
    os.kill(second.pid, signal.SIGKILL)
    within(LONG, lambda: not holds(g))
    first.kill()


def restart():
    """The service of a node is killed and started again: its mount asks for its locks again."""
    child = holder(2, name="g")
    g = opened(3, "g")
    assert holds(g) == 2
    service = int(open(f"{CLUSTER}/n2/run/nicfs.pid").read().split()[0])
    os.kill(service, signal.SIGKILL)
    with open(f"{mount(2)}/after", "w") as file:
        file.write("the mount lives")
    within(LONG, lambda: holds(g) == 2)
    os.kill(child.pid, signal.SIGKILL)
    within(LONG, lambda: not holds(g))


def main():
    {"kinds": kinds, "waiting": waiting, "death": death, "deadlock": deadlock,
     "failover": failover, "restart": restart}[CASE]()
    print("fine")


main()

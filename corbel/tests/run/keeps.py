# What becomes of an fcntl lock while its descriptor changes hands; every line is the same natively.
import array, ctypes, fcntl, mmap, os, socket, subprocess, sys, time

other = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 0, int(sys.argv[2]))
    print('free')
except OSError:
    print('held')
"""


def look(name, start=0):
    command = [sys.executable, "-c", other, name, str(start)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def taken(name, mode=os.O_RDWR, kind=fcntl.LOCK_EX):
    with open(name, "wb") as f:
        f.write(bytes(8192))
    fd = os.open(name, mode)
    fcntl.lockf(fd, kind, 100, 0)
    return fd


def mapped(fd):
    os.lseek(fd, 5, 0)
    kept.append(mmap.mmap(fd, 8192, prot=mmap.PROT_READ))


def flocked(fd):
    fcntl.flock(fd, fcntl.LOCK_EX)


def passed(fd):
    a, b = socket.socketpair()
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    _, ancillary, _, _ = b.recvmsg(1, 64)
    kept.append(array.array("i", ancillary[0][2])[0])


kept = []
for how in (mapped, flocked, passed):
    for mode, kind in ((os.O_RDWR, fcntl.LOCK_EX), (os.O_RDONLY, fcntl.LOCK_SH)):
        name = f"{how.__name__}-{mode}"
        fd = taken(name, mode, kind)
        os.lseek(fd, 7, 0)
        before = look(name)
        how(fd)
        offset = os.lseek(fd, 0, 1)
        print(name, before, look(name), look(name, 4096), offset, fcntl.fcntl(fd, fcntl.F_GETFL) & 3)
        second = os.open(name, os.O_RDONLY)
        print(" still", look(name))
        os.close(second)
        print(" one closed", look(name))
        if how is not passed:
            os.close(fd)
            f = os.open(name, os.O_RDWR)
            # FUSE hears of a close a moment after it.
            for _ in range(200):
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    print(" flock free")
                    break
                except OSError:
                    time.sleep(0.01)
            else:
                print(" flock held")

# What was written since the lock was taken is mapped.
fd = os.open("grown", os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX)
for size in (4096, 40960):
    os.pwrite(fd, b"x" * size, 0)
kept.append(mmap.mmap(fd, 40960))
print("grown", kept[-1][40959:], look("grown"))

# Two descriptions of one file, both changing hands; and a duplicate that is closed.
fd = taken("two")
more = os.open("two", os.O_RDWR)
os.lseek(more, 3, 0)
mapped(fd)
mapped(more)
print("two", look("two"), os.lseek(fd, 0, 1), os.lseek(more, 0, 1))
twin = os.dup(fd)
print(" twin", look("two"))
os.close(twin)
print(" closed", look("two"))

# dup2 and close_range over it.
for over in (lambda fd: os.dup2(0, fd), lambda fd: os.closerange(fd, fd + 1)):
    fd = taken("over")
    flocked(fd)
    before = look("over")
    over(fd)
    print("over", before, look("over"))

# A child has no locks, and what it closes takes none away.
fd = taken("fork")
mapped(fd)
if os.fork() == 0:
    os.close(fd)
    os._exit(0)
os.wait()
print("fork", look("fork"))

# Exec keeps them, whether the file has changed hands or not.
look_again = "subprocess.run([sys.executable, '-c', other, name, '0'], capture_output=True, text=True).stdout.strip()"
for change in (None, mapped, flocked):
    name = f"exec-{change.__name__ if change else 'plain'}"
    if os.fork() == 0:
        fd = taken(name)
        if change:
            change(fd)
        os.set_inheritable(fd, True)
        inner = f"""import os, subprocess, sys
name, other = {name!r}, {other!r}
print(name, {look_again}, flush=True)
os.close({fd})
print(' closed', {look_again})"""
        os.execv(sys.executable, [sys.executable, "-c", inner])
    os.wait()

# But not where it closes a descriptor of the file, were others to stay open; one that fails closes none.
for what in ("alone", "twin", "again", "changed", "unseen", "fails"):
    name = f"closes-{what}"
    if os.fork() == 0:
        fd = taken(name)
        if what in ("again", "changed", "unseen"):
            more = os.open(name, os.O_RDWR)
            os.set_inheritable(more, True)
        if what == "twin":
            os.set_inheritable(os.dup(fd), True)
        if what in ("changed", "unseen"):
            flocked(more)
        if what == "unseen":
            fcntl.lockf(fd, fcntl.LOCK_UN)
            fcntl.lockf(more, fcntl.LOCK_EX, 100, 0)
        before = look(name)
        if what == "fails":
            try:
                os.execv("/no/program", ["x"])
            except OSError:
                pass
            print(name, before, look(name), flush=True)
            os.close(fd)
            print(" closed", look(name), flush=True)
            os._exit(0)
        inner = f"""import subprocess, sys
name, other = {name!r}, {other!r}
print(name, {before!r}, {look_again})"""
        os.execv(sys.executable, [sys.executable, "-c", inner])
    os.wait()

# Whoever locks by a descriptor that came with the program, or that was opened when the file had changed hands, and closes
# another one, has no locks.
if os.fork() == 0:
    fd = os.open("came", os.O_RDWR | os.O_CREAT)
    flocked(fd)
    os.set_inheritable(fd, True)
    inner = f"""import fcntl, os, subprocess, sys
name, other = 'came', {other!r}
more = os.open(name, os.O_RDONLY)
fcntl.lockf({fd}, fcntl.LOCK_EX)
print(name, {look_again})
os.close(more)
print(' closed', {look_again})"""
    os.execv(sys.executable, [sys.executable, "-c", inner])
os.wait()
first = os.open("later", os.O_RDWR | os.O_CREAT)
os.write(first, bytes(8192))
if os.fork() == 0:
    mapped(os.open("later", os.O_RDONLY))
    os._exit(0)
os.wait()
more = os.open("later", os.O_RDWR)
fcntl.lockf(more, fcntl.LOCK_EX)
print("later", look("later"))
os.close(first)
print(" closed", look("later"))

# Of more files than are kept account of beside the kernel.
every = """
import fcntl, os, sys
held = 0
for n in range(530):
    fd = os.open(f'many/{n}', os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held += 1
    os.close(fd)
print(held)
"""


def count():
    return subprocess.run([sys.executable, "-c", every], capture_output=True, text=True).stdout.strip()


os.mkdir("many")
files = [os.open(f"many/{n}", os.O_RDWR | os.O_CREAT) for n in range(530)]
for fd in files:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("many", count())
for n, fd in enumerate(files):
    if n % 2:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    os.write(fd, b"%d" % n)
print(" half", count())
os.closerange(files[-20], files[-1] + 1)
print(" fewer", count(), os.pread(files[509], 9, 0))
for fd in files[:510]:
    os.close(fd)
print(" none", count())

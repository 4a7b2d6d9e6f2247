# Gives up the super-user's rights, as a daemon does, and then looks for what is left of them: in its memory, among its
# descriptors, and in what the programs that it starts are handed. argv: the region's folder.
import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading

USER = 3002
REGION = sys.argv[1]


def attempt(f, *args, **kwargs):
    try:
        return f(*args, **kwargs)
    except OSError as e:
        return errno.errorcode[e.errno]


def mapped():
    """What of the volume or of a session is mapped, by inode, and whether it may be written to."""
    found = {}
    for line in open("/proc/self/maps"):
        words = line.split(None, 5)
        name = words[5].strip() if len(words) > 5 else ""
        if "corbel-state" in name or "corbel-run" in name or REGION in name or "hugepage" in name:
            found[int(words[4])] = (name, "w" in words[1])
    return found


def descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        name = attempt(os.readlink, f"/proc/self/fd/{number}")
        stat = attempt(os.stat, f"/proc/self/fd/{number}")
        if not isinstance(stat, str):
            found[int(number)] = (name, stat)
    return found


def state_of():
    return [ino for ino, (name, _) in mapped().items() if "corbel-state" in name]


def may_write(number):
    """By every way that there is."""
    data = b"/tmp/evil.so\0"
    ways = [
        lambda: os.pwrite(number, data, 2128),
        lambda: os.close(os.open(f"/proc/self/fd/{number}", os.O_RDWR)),
        lambda: mmap.mmap(number, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close(),
        lambda: os.ftruncate(number, 0),
    ]
    return [way for way, f in enumerate(ways) if not isinstance(attempt_any(f), str)]


def attempt_any(f):
    try:
        return f()
    except OSError as e:
        return errno.errorcode[e.errno]


def look(what, before):
    """`before`: the inodes of memory that was the super-user's."""
    kept = [entry for ino, entry in mapped().items() if ino in before]
    print(what, "maps", kept)
    for number, (name, stat) in descriptors().items():
        if stat.st_ino in before:
            print(what, "has", number, name)
        if os.getuid() and "corbel-run" in name and may_write(number):
            print(what, "may write to", name, may_write(number))


def writable(found):
    return {ino for ino, (name, can) in found.items() if can}


PROGRAM = """
fd=$1; shift
for ino; do
    grep " $ino " /proc/$$/maps && echo "program maps $ino"
    ls -Li /proc/$$/fd 2> /dev/null | grep "^ *$ino " && echo "program has $ino"
done
grep -c corbel-state /proc/$$/maps
cat secret 2> /dev/null || echo "program is barred"
echo x > of-the-program; stat -c "program %u" of-the-program; rm of-the-program
head -c 4 <&$fd; echo " of the descriptor"
"""


def program(before):
    return ["/bin/bash", "-c", PROGRAM, "bash", str(shared)] + list(map(str, before))


os.chmod(".", 0o1777)
with open("secret", "w") as f:
    os.chmod("secret", 0o600)
    f.write("data of root")
shared = os.open("shared", os.O_RDWR | os.O_CREAT, 0o600)
os.write(shared, b"written by root")
os.fsync(shared)
os.set_inheritable(shared, True)
roots = writable(mapped())
print("root is served", bool(state_of()), len(roots) >= 2)


def give_up():
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


def daemon():
    look("child", roots - set(state_of()))  # A child of fork is of the session, but has not its parent's log.
    give_up()
    look("user", roots)
    print("user", attempt(open, "secret"), os.pread(shared, 15, 0))
    print("user", os.write(shared, b", and by user"))
    with open("of-the-user", "w") as f:
        f.write("x")
    print("user", os.stat("of-the-user").st_uid, attempt(os.chmod, "of-the-user", 0o4755), attempt(os.chown, "of-the-user", 0, 0))
    print("user", oct(os.stat("of-the-user").st_mode), os.stat("of-the-user").st_uid, attempt(os.unlink, "secret"))
    print("user is served", bool(state_of()), not set(state_of()) & roots)
    os.lseek(shared, 0, 0)
    print(subprocess.run(program(roots), close_fds=False, stdout=subprocess.PIPE, text=True).stdout, end="")


def child(f):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            f()
        except BaseException as e:
            print("failed", repr(e))
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitpid(pid, 0)[1])


child(daemon)


def threads():
    # The others are at it all the time.
    stop, done = threading.Event(), []

    def work(n):
        count = 0
        while not stop.is_set():
            fd = attempt(os.open, f"t{n}-{count % 50}-{os.getuid()}", os.O_RDWR | os.O_CREAT)
            if isinstance(fd, int):
                attempt(os.write, fd, b"x" * 3000)
                attempt(os.fsync, fd)
                if count % 3 == 0:
                    attempt(os.unlink, f"t{n}-{(count + 7) % 50}-{os.getuid()}")
                attempt(os.close, fd)
            count += 1
        done.append(count > 0)

    all = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in all:
        t.start()
    threading.Event().wait(0.3)
    own = writable(mapped())
    give_up()
    left = {ino for ino in writable(mapped()) if ino in own}
    threading.Event().wait(0.3)
    stop.set()
    for t in all:
        t.join()
    print("threads", sorted(done), "keep", left, attempt(open, "secret"))
    made = [name for name in os.listdir(".") if name.startswith("t") and name.endswith(f"-{USER}")]
    print("threads made", len(made) > 0, {os.stat(name).st_uid for name in made})


child(threads)


# Who can go back is who he was.
def there_and_back():
    state = state_of()
    os.setegid(USER)
    os.seteuid(USER)
    print("for a time", attempt(open, "secret"))
    os.seteuid(0)
    os.setegid(0)
    print("again", open("secret").read(), state == state_of())


child(there_and_back)

# By vfork and exec, as shells and spawners do.
os.lseek(shared, 0, 0)
become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
said = subprocess.run(become + program(roots), close_fds=False, pass_fds=[], stdout=subprocess.PIPE, text=True)
print(said.stdout, end="")
print("root", open("shared").read(), attempt(os.stat, "secret").st_uid)

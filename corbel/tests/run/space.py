# What becomes of a volume when the file system below it is full. argv: corbel, an empty directory. In a mount namespace of
# its own, so that the file system below is a small one.
import errno
import json
import os
import signal
import subprocess
import sys
import time

CORBEL, DIR = sys.argv[1:3]
SMALL, MNT = f"{DIR}/small", f"{DIR}/mnt"
CONFIG = f"{DIR}/corbel.toml"
for sub in (SMALL, MNT, f"{DIR}/run", f"{DIR}/fabric", f"{DIR}/coordinator"):
    os.mkdir(sub, 0o700)
subprocess.check_call(["mount", "-t", "tmpfs", "-o", "size=200m", "small", SMALL])


def configure(capacity):
    open(CONFIG, "w").write(
        f"""[cluster]
id = "space"
coordinator = "{DIR}/coordinator/coordinator.sock"
coordinator_dir = "{DIR}/coordinator"
replicas = 1
[node]
id = 1
transport = "shm"
shm_dir = "{DIR}/fabric"
region = "{SMALL}/region"
capacity = "{capacity}"
stream = "16MiB"
socket = "{DIR}/run/hostd.sock"
[log]
lanes = 2
lane_bytes = "5MiB"
"""
    )


def corbel(*args):
    done = subprocess.run([CORBEL, "--config", CONFIG, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=100)
    return done.returncode, (done.stdout + done.stderr).decode()


started = []


def start(*args):
    log = open(f"{DIR}/log", "ab")
    started.append(subprocess.Popen([CORBEL, "--config", CONFIG, *args], stdout=log, stderr=log))
    return started[-1]


def wait(what, ask):
    end = time.monotonic() + 60
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within a minute\n" + open(f"{DIR}/log").read()[-4000:])
        time.sleep(0.02)


def serve():
    return [start("serve", role) for role in ("coordinator", "nicfs", "hostd")]


def mount():
    wait("the service", lambda: corbel("status")[0] == 0)
    # The log of the mount before goes first.
    wait("a mount", lambda: start("mount", MNT).wait(60) == 0)


def up():
    service = serve()
    mount()
    return service


def down(processes):
    subprocess.check_call(["umount", MNT])
    for p in reversed(processes):
        p.send_signal(signal.SIGTERM)
        p.wait(60)


def take(others, step=1 << 16):
    """Others write until there is no room; the error."""
    try:
        while others.write(bytes(step)):
            pass
    except OSError as e:
        return errno.errorcode[e.errno]


def fill(path, step=1 << 20, most=1 << 30):
    """Writes until there is no room; the error, and how much was taken."""
    written = 0
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        while written < most:
            written += os.write(fd, os.urandom(4096) * (step // 4096))
        os.fsync(fd)
        said = "none"
    except OSError as e:
        said = errno.errorcode[e.errno]
    try:
        os.close(fd)
    except OSError as e:
        said = errno.errorcode[e.errno]
    return said, written >> 20


def lives(processes):
    return [p.poll() for p in processes]


try:
    configure("1GiB")
    code, said = corbel("mkfs")
    print("mkfs of too much:", code, "1024 MiB" in said and "200 MiB" in said and "--sparse" in said)
    left = os.statvfs(SMALL)
    print("takes nothing:", left.f_blocks - left.f_bfree < 16)

    # By the word that overrules.
    print("sparse:", corbel("mkfs", "--sparse", "--force")[0])
    processes = up()
    said, taken = fill(MNT + "/a")
    print("written until it is full:", said, 100 < taken < 200, lives(processes))
    os.truncate(MNT + "/a", 5 << 20)
    os.sync()
    wait("room", lambda: os.statvfs(MNT).f_bavail * 4096 > 64 << 20)
    said, taken = fill(MNT + "/b", most=50 << 20)
    print("and again, when there is room:", said, taken, lives(processes))
    # Others take what is left.
    others = open(SMALL + "/others", "wb", 0)
    print("others:", take(others))
    # What was freed before may go back to the file system below only now, on a busy machine: that is theirs as well.
    wait("no room", lambda: take(others) and os.statvfs(MNT).f_bavail == 0)
    said, taken = fill(MNT + "/c")
    print("written where others were:", said, lives(processes))
    down(processes)
    print("ended:", [p.returncode for p in processes])
    others.seek(0, 2)
    try:
        while others.write(bytes(1 << 12)):
            pass
    except OSError as e:
        print("others:", errno.errorcode[e.errno])
    processes = serve()
    wait("the service", lambda: corbel("status")[0] == 0)
    code, said = corbel("mount", MNT)
    print("a start on a full one:", lives(processes), "a log:", code, said.splitlines()[0].rsplit(": ", 1)[1])
    others.truncate(0)
    mount()
    print("what was there:", os.stat(MNT + "/b").st_size >> 20)
    wait("room", lambda: os.statvfs(MNT).f_bavail * 4096 > 32 << 20)
    print("and it goes on:", fill(MNT + "/d", most=20 << 20), lives(processes))
    down(processes)

    # What is reserved nobody else gets.
    configure("64MiB")
    others.truncate(0)
    others.seek(0)
    for left in os.listdir(f"{DIR}/coordinator"):
        os.unlink(f"{DIR}/coordinator/{left}")
    print("reserved:", corbel("mkfs", "--force")[0])
    processes = up()
    try:
        while others.write(bytes(1 << 16)):
            pass
    except OSError as e:
        print("others:", errno.errorcode[e.errno])
    said, taken = fill(MNT + "/a")
    print("all that was promised:", said, taken > 55, lives(processes))
    down(processes)
    processes = up()
    print("and after a start:", os.stat(MNT + "/a").st_size > 55 << 20, lives(processes))
    os.truncate(MNT + "/a", 1 << 20)
    wait("room", lambda: os.statvfs(MNT).f_bavail * 4096 > 60 << 20)
    said, taken = fill(MNT + "/b")
    print("given back, and taken again:", said, taken > 50, lives(processes))
    down(processes)
    print("checked:", corbel("fsck")[0])
finally:
    for p in started:
        if p.poll() is None:
            p.kill()
    subprocess.call(["umount", "-l", MNT], stderr=subprocess.DEVNULL)

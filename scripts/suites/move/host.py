"""What the host of ../move.sh does: `monitor SOCKET COMMAND` says what QEMU answers; `tries SECONDS DIR` tries all the time to lock what the
guest has, and fails if it ever can; `keep FILE` locks a file until it is killed."""
import fcntl
import os
import socket
import sys
import time


def answer(monitor):
    """Up to the next prompt."""
    text = b""
    while not text.endswith(b"(qemu) "):
        more = monitor.recv(65536)
        if not more:
            break
        text += more
    return text.decode(errors="replace")


def monitor(path, command):
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.settimeout(30)
        monitor.connect(path)
        answer(monitor)
        monitor.sendall(command.encode() + b"\n")
        print(answer(monitor))


def is_held(path, lock):
    with open(path, "r+b") as file:
        try:
            lock(file)
        except OSError:
            return True
        return False


def tries(seconds, where):
    both, record = fcntl.LOCK_EX | fcntl.LOCK_NB, lambda f: fcntl.lockf(f, both, 5, 10)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for name, lock in ("lock", lambda f: fcntl.flock(f, both)), ("record", record):
            count += 1
            if not is_held(os.path.join(where, name), lock):
                sys.exit(f"try {count}: {name} was free")
    print(f"{count} tries")


def keep(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(3600)


what, *args = sys.argv[1:]
if what == "monitor":
    monitor(*args)
elif what == "tries":
    tries(float(args[0]), args[1])
else:
    keep(*args)

"""What two guests do with the same files at the same time. Usage: pair.py WHAT PATH ARGS..."""

import fcntl
import os
import sys
import time


def line(who, n):
    return f"{who} {n} {'x' * (n * 37 % 200)}\n".encode()


def append(path, who, count):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for n in range(int(count)):
        text = line(who, n)
        assert os.write(fd, text) == len(text)
    os.close(fd)


def appended(path, count):
    with open(path, "rb") as file:
        found = file.readlines()
    wanted = [line(who, n) for who in ("one", "two") for n in range(int(count))]
    assert len(found) == len(wanted), f"{len(found)} of {len(wanted)} lines"
    assert sorted(found) == sorted(wanted), "other lines than were written"
    # And of each guest in the order in which it wrote them.
    for who in (b"one ", b"two "):
        own = [int(text.split()[1]) for text in found if text.startswith(who)]
        assert own == sorted(own), f"{who}: out of order"


def count_under(lock, unlock, path, count):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(int(count)):
        lock(fd)
        number = int(os.pread(fd, 20, 0) or b"0")
        os.pwrite(fd, b"%d" % (number + 1), 0)
        unlock(fd)
    os.close(fd)


def flock(path, count):
    count_under(lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN), path, count)


def fcntl_lock(path, count):
    count_under(lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX), lambda fd: fcntl.lockf(fd, fcntl.LOCK_UN), path, count)


def until(ready):
    while not (found := ready()):
        time.sleep(0.01)
    return found


def content(n):
    return bytes((n * 31 + i * 7) % 251 for i in range(1 + n * 977 % 9000))


def compare(path, role, rounds):
    """One writes round N to a file that both have open, and then its number to another; the other looks at once."""
    data, ball, back = (os.open(f"{path}/compare-{name}", os.O_RDWR | os.O_CREAT, 0o644) for name in ("data", "ball", "back"))
    for n in range(1, int(rounds) + 1):
        text, name = content(n), f"{path}/compare-named"
        if role == "one":
            os.pwrite(data, text, 0)
            os.ftruncate(data, len(text))
            with open(f"{name}-{n}", "wb") as file:
                file.write(text[::-1])
            os.rename(f"{name}-{n}", name)
            os.pwrite(ball, b"%08d" % n, 0)
            until(lambda: os.pread(back, 8, 0) == b"%08d" % n)
        else:
            until(lambda: os.pread(ball, 8, 0) == b"%08d" % n)
            assert os.fstat(data).st_size == len(text), f"round {n}: {os.fstat(data).st_size} bytes of {len(text)}"
            assert os.pread(data, 20000, 0) == text, f"round {n}: other bytes"
            with open(name, "rb") as file:
                assert file.read() == text[::-1], f"round {n}: the name leads to another file"
            assert not os.path.exists(f"{name}-{n}"), f"round {n}: the old name is there"
            os.pwrite(back, b"%08d" % n, 0)


WHAT = {"append": append, "appended": appended, "flock": flock, "fcntl": fcntl_lock, "compare": compare}
WHAT[sys.argv[1]](*sys.argv[2:])

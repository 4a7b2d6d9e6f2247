# Descriptors that come and go in some threads while others fork and exit: what one opens is nobody else's.
import os, sys, threading, time

where, end = sys.argv[1], time.time() + float(sys.argv[2])
wrong = []


def check(right, what):
    if not right:
        wrong.append(what)


def content(name):
    return name.encode() * 50


threading.excepthook = lambda failed: wrong.append(repr(failed.exc_value))

# Stays open in all of them, with one offset.
shared = os.open(f"{where}/shared", os.O_RDWR | os.O_CREAT, 0o644)
os.write(shared, content("shared"))


def comes_and_goes(n):
    turn = 0
    while time.time() < end:
        turn += 1
        name = f"{where}/{n}"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        text = content(f"{n}.{turn}")
        check(os.write(fd, text) == len(text), "written")
        other = os.dup(fd)
        os.close(fd)
        os.lseek(other, 0, 0)
        check(os.read(other, 1 << 16) == text, f"file {n}")
        os.close(other)


def forks():
    while time.time() < end:
        child = os.fork()
        if child == 0:
            try:
                fd = os.open(f"{where}/child", os.O_RDWR | os.O_CREAT, 0o644)
                good = os.pread(shared, 1 << 16, 0) == content("shared")
                os.close(fd)
                os._exit(0 if good else 1)
            except OSError:
                os._exit(2)
        check(os.waitpid(child, 0)[1] == 0, "child")
        # A child with threads, which ends in their midst.
        child = os.fork()
        if child == 0:
            def busy():
                while True:
                    os.close(os.dup(shared))
            for _ in range(2):
                threading.Thread(target=busy, daemon=True).start()
            time.sleep(0.005)
            os._exit(0)
        check(os.waitpid(child, 0)[1] == 0, "busy child")
        check(os.pread(shared, 1 << 16, 0) == content("shared"), "shared")


threads = [threading.Thread(target=comes_and_goes, args=(n,)) for n in range(3)]
threads.append(threading.Thread(target=forks))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.lseek(shared, 3, 0)
check(os.read(shared, 3) == b"red", "offset")
print("right" if not wrong else sorted(set(wrong)))

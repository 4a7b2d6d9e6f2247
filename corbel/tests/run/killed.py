"""Whoever shares a file's offset may be killed in the middle of a call: the others go on, before anybody has asked for its end."""
import os, sys, time

os.chdir(sys.argv[1])
fd = os.open("log", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
for _ in range(150):
    pid = os.fork()
    if pid == 0:
        while True:
            os.lseek(fd, 0, 0)
            os.write(fd, b"x" * 65536)
    time.sleep(0.01)
    os.kill(pid, 9)
    time.sleep(0.005)
    os.write(fd, b"done\n")
    os.waitpid(pid, 0)
print("went on")

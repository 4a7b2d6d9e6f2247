# Takes the name of the descriptor holder when `corbel run` has ended, as another user, and waits for what is left of the
# session to hand it the super-user's descriptors. argv: how to run a program under `corbel run`.
import array
import os
import socket
import subprocess
import sys
import time

LEFT = """
import mmap, os, sys, time
if os.fork() == 0:
    limit = time.time() + 60
    while not os.path.exists("taken") and time.time() < limit:
        time.sleep(0.01)
    fd = os.open("secret", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"x" * 4096)
    pid = os.fork()
    if pid == 0:
        # What two processes share is the holder's to keep when the kernel gets it.
        mmap.mmap(fd, 4096)[0]
        os._exit(0)
    os.waitpid(pid, 0)
    os.write(fd, b"y")
    print(os.stat("secret").st_size, flush=True)
    open("done", "w").close()
"""

run = subprocess.Popen(sys.argv[1:] + ["python3", "-c", LEFT])
run.wait()
name = f"\0corbel-run-{os.getuid()}-{run.pid}"
for line in open("/proc/net/unix"):
    assert name[1:] not in line, "the holder is gone"
ready = os.pipe()
imposter = os.fork()
if imposter == 0:
    os.setgroups([])
    os.setresgid(3002, 3002, 3002)
    os.setresuid(3002, 3002, 3002)
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.bind(name)
    s.listen(16)
    s.settimeout(60)
    os.write(ready[1], b"1")
    got = 0
    while True:
        try:
            c, _ = s.accept()
        except TimeoutError:
            break
        body, control, _, _ = c.recvmsg(20, socket.CMSG_SPACE(128))
        for _, _, data in control:
            got += len(array.array("i", data))
        if body == b"end":
            break
        c.close()
    print("descriptors for the imposter:", got, flush=True)
    os._exit(0)
os.read(ready[0], 1)
open("taken", "w").close()
limit = time.time() + 60
while not os.path.exists("done") and time.time() < limit:
    time.sleep(0.01)
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect(name)
end.send(b"end")
os.waitpid(imposter, 0)

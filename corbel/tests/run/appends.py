"""A list of more than a mebibyte is appended in parts; what others append in between stays."""
import os, sys

os.chdir(sys.argv[1])
pid = os.fork()
if pid == 0:
    fd = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for _ in range(8):
        parts = [b"a" * 1000000] * 4
        assert os.writev(fd, parts) == 4000000
    os._exit(0)
fd, count = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 0
while os.waitpid(pid, os.WNOHANG) == (0, 0):
    os.write(fd, b"B\n")
    count += 1
data = open("log", "rb").read()
print("lines lost", count - data.count(b"B\n"), "bytes of others lost", 32000000 - data.count(b"a"))
os.unlink("log")

"""A buffer that is much larger than the file takes no memory but what is read."""
import os, resource, sys

os.chdir(sys.argv[1])
fd = os.open("file", os.O_RDWR | os.O_CREAT)
os.write(fd, b"text" * 700000)
for read in (lambda: os.pread(fd, 1 << 30, 0), lambda: (os.lseek(fd, 0, 0), os.read(fd, 1 << 30))[1], lambda: os.read(fd, 1 << 30),
             lambda: os.pread(fd, 1 << 30, 5 << 20), lambda: os.pread(fd, 2 << 20, 1 << 20)):
    got = read()
    print(len(got), got[:3], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 300000)

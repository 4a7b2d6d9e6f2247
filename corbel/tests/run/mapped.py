"""More files mapped shared than the session notes: what a mapping says and what a read says is one."""
import mmap, os, sys

os.chdir(sys.argv[1])
bad = 0
for n in range(1100):
    fd = os.open(f"f{n}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4096)
    m = mmap.mmap(fd, 4096)
    m[:4] = b"said"
    other = os.open(f"f{n}", os.O_RDWR)
    bad += os.read(other, 4) != b"said"
    os.pwrite(other, b"back", 8)
    bad += m[8:12] != b"back"
    for f in fd, other:
        os.close(f)
    m.close()
    os.unlink(f"f{n}")
print("wrong", bad)

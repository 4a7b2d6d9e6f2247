"""Private mappings: what madvise, mremap and faults make of them is what the file has."""
import ctypes, mmap, os, signal, sys

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MAYMOVE, DONTNEED, FREE, REMOVE = 1, 4, 8, 9
PAGE = 4096
os.chdir(sys.argv[1])
for name, size in ("small", 1000), ("pages", 3 * PAGE), ("odd", 5 * PAGE + 77), ("large", 700 * PAGE + 1):
    open(name, "wb").write(bytes(i // 16 % 251 + 1 for i in range(size)))


def show(at, size):
    got = ctypes.string_at(at, size)
    return f"{sum(got)} {got[:3].hex()} {got[-3:].hex()}"


def dies(at):
    pid = os.fork()
    if pid == 0:
        ctypes.string_at(at, 1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def advise(at, size, what):
    ret = libc.madvise(at, size, what)
    return ret and os.strerror(ctypes.get_errno())


for name, offset, pages, prot in (
    ("small", 0, 1, 1), ("pages", 0, 3, 3), ("pages", 0, 1, 3), ("pages", 1, 1, 1), ("pages", 1, 2, 3),
    ("odd", 0, 6, 1), ("odd", 5, 1, 3), ("odd", 2, 1, 1), ("large", 0, 701, 3), ("large", 600, 101, 1), ("large", 7, 300, 3),
):
    print(name, offset, pages, prot)
    fd = os.open(name, os.O_RDONLY)
    at = libc.mmap(None, pages * PAGE, prot, mmap.MAP_PRIVATE, fd, offset * PAGE)
    os.close(fd)
    size = pages * PAGE
    print("mapped", show(at, size))
    if prot == 3:
        ctypes.memset(at, 0xEE, 64)
        print("changed", show(at, size))
    print("not needed", advise(at, size, DONTNEED), show(at, size))
    print("free", advise(at, size, FREE), "remove", advise(at, size, REMOVE))
    print("beyond", show(at, size))
    at = libc.mremap(at, size, size + 2 * PAGE, MAYMOVE)
    print("longer", show(at, size), "then", dies(at + size), dies(at + size + PAGE))
    if (offset + pages + 2) * PAGE <= os.stat(name).st_size:
        print("more", show(at, size + 2 * PAGE))
    print("file", os.stat(name).st_size, sum(open(name, "rb").read()))
m = mmap.mmap(os.open("odd", os.O_RDWR), 0, flags=mmap.MAP_PRIVATE)
m[:4] = b"mine"
print(m[:4], open("odd", "rb").read(4), m.find(bytes([249])))

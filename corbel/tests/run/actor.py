"""Does calls on files as it is told, one JSON line each, and says what came of them: for tests that draw what is
done where. Files are known by a number, since their names change; descriptors and mappings stay open until
it is told to close them."""
import ctypes
import errno
import fcntl
import json
import mmap
import os
import sys

FICLONE = 0x40049409
O_DIRECT = os.O_DIRECT
libc = ctypes.CDLL(None, use_errno=True)
root = sys.argv[1]
held, direct, maps = {}, {}, {}


def path(name):
    return os.path.join(root, name)


def fd(file, name, table=held, flags=0):
    if file not in table:
        table[file] = os.open(path(name), os.O_RDWR | flags)
    return table[file]


def whole(fd):
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def read(file, name, how, at, size):
    if how == "held":
        return os.pread(fd(file, name), size, at)
    if how == "direct":
        room = mmap.mmap(-1, -(-size // 4096) * 4096)
        got = os.preadv(fd(file, name, direct, O_DIRECT), [room], at)
        return room[:min(got, size)]
    if how == "mapped":
        # What is mapped already is right once the file was read.
        os.pread(fd(file, name), 1, 0)
        if file not in maps:
            maps[file] = mmap.mmap(held[file], 0)
        return maps[file][at : at + size]
    new = os.open(path(name), os.O_RDONLY)
    try:
        if how == "opened":
            return whole(new)[at : at + size]
        with mmap.mmap(new, 0, prot=mmap.PROT_READ) as mapping:  # newly mapped
            return mapping[at : at + size]
    finally:
        os.close(new)


def write(file, name, how, at, data):
    if how == "held":
        os.pwrite(fd(file, name), data, at)
    elif how == "direct":
        room = mmap.mmap(-1, len(data))
        room[:] = data
        os.pwritev(fd(file, name, direct, O_DIRECT), [room], at)
    elif how == "append":
        new = os.open(path(name), os.O_WRONLY | os.O_APPEND)
        os.write(new, data)
        os.close(new)
    elif how == "mapped":
        new = os.open(path(name), os.O_RDWR)
        with mmap.mmap(new, 0) as mapping:
            mapping[at : at + len(data)] = data
            mapping.flush()
        os.close(new)
    else:
        new = os.open(path(name), os.O_WRONLY)
        os.pwrite(new, data, at)
        os.close(new)


def show(stat):
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_nlink, stat.st_mode & 0o7777]


def fallocate(fd, mode, at, size):
    to = [ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_long(at), ctypes.c_long(size)]
    if libc.fallocate(*to) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def do(op, file, name, *more):
    if op == "read":
        how, at, size = more
        return read(file, name, how, at, size).hex()
    if op == "write":
        how, at, data = more
        return write(file, name, how, at, bytes.fromhex(data))
    if op == "cut":
        how, size = more
        if how == "held":
            return os.ftruncate(fd(file, name), size)
        return os.truncate(path(name), size)
    if op == "rewrite":
        # From nothing to the same length, in one go.
        new = os.open(path(name), os.O_WRONLY | os.O_TRUNC)
        os.write(new, bytes.fromhex(more[0]))
        return os.close(new)
    if op == "fallocate":
        return fallocate(fd(file, name), *more)
    if op == "copy":
        other, its_name, at, to, size = more
        # As cp does: the kernel looks at the size that it knows.
        os.fstat(fd(other, its_name))
        done = 0
        while done < size:
            done += os.copy_file_range(fd(other, its_name), fd(file, name), size - done, at + done, to + done)
        return None
    if op == "clone":
        other, its_name = more
        try:
            fcntl.ioctl(fd(file, name), FICLONE, fd(other, its_name))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EXDEV):
                raise
            return False  # it has become the kernel's, since it was mapped
        return True
    if op == "times":
        how, ns = more
        return os.utime(fd(file, name) if how == "held" else path(name), ns=(ns, ns))
    if op == "chmod":
        how, mode = more
        return os.chmod(fd(file, name) if how == "held" else path(name), mode)
    if op == "stat":
        return show(os.fstat(fd(file, name)) if more[0] == "held" else os.stat(path(name)))
    if op == "end":
        return os.lseek(fd(file, name), 0, os.SEEK_END)
    if op == "link":
        return os.link(path(name), path(more[0]))
    if op == "rename":
        return os.rename(path(name), path(more[0]))
    if op == "unlink":
        return os.unlink(path(name))
    if op == "close":
        if file in maps:
            maps.pop(file).close()
        for table in held, direct:
            if file in table:
                os.close(table.pop(file))
        return None
    raise ValueError(op)


for line in sys.stdin:
    try:
        said = [do(*json.loads(line)), None]
    except Exception as error:  # whatever it is, the test is told
        said = [None, repr(error)]
    print(json.dumps(said), flush=True)

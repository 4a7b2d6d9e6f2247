"""What happens at the end of the largest file, 16 TiB: the same on a mount and under `corbel run`.

  ends.py write FILE    works on the file, checks itself, and leaves it as `read` wants it
  ends.py read FILE     what another process or node must see of it
"""
import ctypes, errno, os, sys

END, PAGE = 1 << 44, 4096
LAST = END - PAGE
path = sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)


def refused(what, number, call):
    try:
        call()
    except OSError as e:
        assert e.errno == number, (what, e)
    else:
        raise AssertionError(what + ' is not refused')


def fallocate(fd, mode, offset, length):
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if libc.fallocate(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), 'fallocate')


def seek(fd, offset, whence):
    return os.lseek(fd, offset, whence)


def one_piece(fd, begin, end):
    """The file has data from `begin` to `end`, rounded to blocks or not, and nowhere else."""
    at = seek(fd, 0, os.SEEK_DATA)
    assert begin & -PAGE <= at <= begin, at
    assert seek(fd, at, os.SEEK_HOLE) == end


def write():
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    # The last byte, and none behind it.
    assert os.pwrite(fd, b'z', END - 1) == 1
    assert os.fstat(fd).st_size == END
    refused('a write behind the end', errno.EFBIG, lambda: os.pwrite(fd, b'z', END))
    refused('a write far behind it', errno.EFBIG, lambda: os.pwrite(fd, b'z', 2 * END))
    refused('growing', errno.EFBIG, lambda: os.ftruncate(fd, END + 1))
    refused('reserving', errno.EFBIG, lambda: fallocate(fd, 0, END - PAGE, 2 * PAGE))
    assert os.fstat(fd).st_size == END
    # What fits of a write that does not fit as a whole, as on other file systems.
    assert os.pwrite(fd, b'12345678', END - 4) == 4
    assert os.pread(fd, 100, END - 6) == b'\0\x001234' and os.pread(fd, 100, END) == b''
    os.fsync(fd)
    one_piece(fd, END - 4, END)
    # On and across the bounds of 32 bits, of blocks, and of what is one entry of the log.
    data = bytes(range(256)) * 8192
    for at in (0, (1 << 32) - 1000, (1 << 43) - 12345, END - (3 << 20)):
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], at + done)
        assert os.pread(fd, len(data), at) == data, at
    assert os.fstat(fd).st_blocks * 512 < 64 << 20, 'it is sparse'
    # A hole at the end keeps the size; allocating fills it with zeroes.
    fallocate(fd, 3, LAST, PAGE)
    assert os.fstat(fd).st_size == END and os.pread(fd, PAGE, LAST) == bytes(PAGE)
    fallocate(fd, 0, LAST, PAGE)
    assert os.pread(fd, PAGE, LAST) == bytes(PAGE)
    # Positions of the descriptor.
    assert seek(fd, -1, os.SEEK_END) == END - 1 and os.write(fd, b'Z') == 1
    refused('a write at the end', errno.EFBIG, lambda: os.write(fd, b'Z'))
    assert seek(fd, 0, os.SEEK_CUR) == END
    # Down and up again: what was there is gone.
    os.ftruncate(fd, END - (2 << 20))
    os.ftruncate(fd, END)
    assert os.pread(fd, PAGE, LAST) == bytes(PAGE)
    assert os.pread(fd, 1 << 20, END - (3 << 20)) == data[:1 << 20]
    assert os.pwrite(fd, b'end', END - 3) == 3
    os.fsync(fd)
    os.close(fd)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    refused('appending', errno.EFBIG, lambda: os.write(fd, b'x'))
    os.close(fd)


def read():
    fd = os.open(path, os.O_RDONLY)
    data = bytes(range(256)) * 8192
    assert os.fstat(fd).st_size == END
    assert os.pread(fd, 10, END - 3) == b'end'
    for at in (0, (1 << 32) - 1000, (1 << 43) - 12345):
        assert os.pread(fd, len(data), at) == data, at
        assert os.pread(fd, 10, at + len(data)) == bytes(10)
    assert os.pread(fd, PAGE, 1 << 40) == bytes(PAGE)
    data_at = (1 << 43) - 12345
    assert data_at & -PAGE <= seek(fd, 1 << 40, os.SEEK_DATA) <= data_at
    assert seek(fd, 1 << 40, os.SEEK_HOLE) == 1 << 40
    assert seek(fd, END - 3, os.SEEK_HOLE) == END
    refused('data behind the end', errno.ENXIO, lambda: seek(fd, END, os.SEEK_DATA))
    os.close(fd)


{'write': write, 'read': read}[sys.argv[1]]()
print('good')

# A handle of a file that one mount has given out, opened in another whose kernel has never seen the file: names of two mounts.
import ctypes
import os
import sys

libc = ctypes.CDLL(None, use_errno=True)


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_char * 128)]


def handle_of(path):
    handle, mount = Handle(bytes=128), ctypes.c_int()
    if libc.name_to_handle_at(-100, path.encode(), ctypes.byref(handle), ctypes.byref(mount), 0) != 0:
        raise OSError(ctypes.get_errno(), f"the handle of {path}")
    return handle


def opened(mount, handle, flags):
    root = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    fd = libc.open_by_handle_at(root, ctypes.byref(handle), flags)
    errno = ctypes.get_errno()
    os.close(root)
    return fd if fd >= 0 else os.strerror(errno)


here, there = sys.argv[1:]
os.makedirs(f"{here}/handles/of")
with open(f"{here}/handles/of/file", "w") as f:
    f.write("its content")
    os.fsync(f.fileno())
file, folder = handle_of(f"{here}/handles/of/file"), handle_of(f"{here}/handles/of")
fd = opened(there, file, os.O_RDONLY)
print(os.read(fd, 100).decode() if isinstance(fd, int) else fd)
fd = opened(there, folder, os.O_RDONLY | os.O_DIRECTORY)
print(os.listdir(fd) if isinstance(fd, int) else fd)
gone = f"{here}/handles/gone"
with open(gone, "w") as f:
    f.write("short-lived")
handle = handle_of(gone)
os.unlink(gone)
print(opened(there, handle, os.O_RDONLY))

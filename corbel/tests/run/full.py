"""Fills the volume again and again: DIRECTORY ROUNDS [fsync]. Says what write and then fsync and close answer."""
import errno, os, sys, time

where, rounds, sync = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["fsync"]


def answer(call):
    try:
        call()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]


for turn in range(rounds):
    path = f"{where}/full{turn}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    said = "ok"
    while said == "ok":
        said = answer(lambda: os.write(fd, bytes(1 << 20)))
    if sync:
        said += " " + answer(lambda: os.fsync(fd))
    print(said, answer(lambda: os.close(fd)))
    os.unlink(path)
    end = time.monotonic() + 60
    while os.statvfs(where).f_bfree < os.statvfs(where).f_blocks and time.monotonic() < end:
        time.sleep(0.05)

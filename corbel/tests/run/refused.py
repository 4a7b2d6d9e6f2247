"""Makes files with large attributes until the volume is full: what stat and unlink say of those that were refused."""
import errno, os


def answer(call):
    try:
        call()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]


refused = []
for number in range(2000):
    name = f"refused{number}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    said = [answer(lambda: os.setxattr(fd, "user.a", bytes(60000))), answer(lambda: os.fsync(fd))]
    answer(lambda: os.close(fd))
    if "ENOSPC" in said:
        refused.append(name)
    if len(refused) == 4:
        break
# Some were made, and only their attributes refused.
there = [name for name in refused if name in os.listdir(".")]
for name in refused:
    print(name in there, answer(lambda: os.stat(name)), answer(lambda: os.unlink(name)))

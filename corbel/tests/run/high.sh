# Numbers beyond those that the engine keeps a table of.
cd "$1" || exit 1
ulimit -n 100000 2>/dev/null || { echo no room; exit 0; }
exec 5>f
exec 70000>&5
echo one >&70000
echo two >&5
exec 5>&-
echo three >&70000
exec 6>&70000
echo four >&6
exec 70000>&-
cat f
python3 -c "
import fcntl, os
fd = os.open('g', os.O_RDWR | os.O_CREAT)
os.write(fd, b'first ')
for command in fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC:
    high = fcntl.fcntl(fd, command, 80000)
    print(high, os.write(high, b'second '), os.lseek(fd, 0, 1), fcntl.fcntl(high, fcntl.F_GETFD))
print(os.dup2(fd, 99999), os.write(99999, b'third'), os.pread(fd, 99, 0))
"

# In a directory of his own, an ordinary user who calls himself root.
cd "$1/home" || exit 1
echo before > held
exec 4>>held
unshare -Ur sh -c '
echo hi > made; cat made; stat -c %u:%g made
echo more >> held; exec 3<>held; cat <&3; id -u; echo by >&4; mkdir dir; stat -c %u dir'
python3 -c '
import ctypes, os
libc = ctypes.CDLL(None)
open("first", "w").write("x")
assert libc.unshare(0x10000000) == 0
open("second", "w").write("y")
print(os.getuid() == os.stat("second").st_uid == os.stat("first").st_uid)
pid = os.fork()
if pid == 0:
    open("third", "w").write("z")
    os._exit(0)
print(os.waitpid(pid, 0)[1])'
sync
ls; stat -c '%n %u:%g' made held dir first second third; cat held first second third

# An ordinary user's programs, which hand descriptors and directories on by fork and exec: each process
# must show the service anew that it came to an inode by a name. Runs in a directory of the user's.
set -e
mkdir -p a/b
echo one > a/b/f
cd a/b
exec 5< f
sh -c 'read x <&5; echo child read $x; cat f; ls; (cd .. && ls); cat ../b/f'
python3 - <<'P'
import os
d = os.open('.', os.O_RDONLY | os.O_DIRECTORY)
g = os.open('g', os.O_RDWR | os.O_CREAT)
os.write(g, b'data')
pid = os.fork()
if pid == 0:
    assert os.pread(g, 4, 0) == b'data'
    assert sorted(os.listdir(d)) == ['f', 'g'], os.listdir(d)
    os.fchdir(d)
    assert os.stat('g').st_size == 4 and open('../b/f').read() == 'one\n'
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
os.set_inheritable(g, True)
os.set_inheritable(d, True)
show = 'import os; print(os.pread(%d, 4, 0), sorted(os.listdir(%d)), os.fstat(%d).st_size, open("g").read())'
os.execvp('python3', ['python3', '-c', show % (g, d, g)])
P
for i in $(seq 1 100); do echo $i > n$i; done
ls | wc -l
rm n*
ln f h
stat -c %h h
ls ../../../private 2> /dev/null || echo closed
cat ../../../private/open/f 2> /dev/null || echo closed

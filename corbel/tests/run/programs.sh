# Unmodified programs. $1: directory; $STATIC: a static cat, echo and head. The output must be the
# same on any file system.
cd "$1" || exit 1
root=$PWD
mkdir programs && cd programs || exit 1

echo "== shell"
env -i /bin/sh -c 'echo envi > e; /bin/cat e'
exec 5>log; env -i /bin/sh -c 'echo inherited >&5'; cat log; exec 5>&-
printf '#!/bin/sh\necho script "$@"\n' > s.sh; chmod +x s.sh; ./s.sh 1 2
set -C; echo x > noclobber; (echo y > noclobber) 2>/dev/null || echo kept; set +C
seq 1 5000 > n; mapfile -t lines < n; echo ${#lines[@]}; read -r first < n; echo "$first"
diff <(cat n) n && echo process substitution
mkfifo ff; (echo fifo > ff &); cat ff
cat e "//$root/programs/./e" "$root/programs/../programs/e"

echo "== exec from the file system"
cp /bin/echo own; ./own dynamic; PATH=$PWD:$PATH own found
cp "$STATIC" static; ./static echo static

echo "== coreutils"
sort -R n | sort -n -S 64k -T . | md5sum
split -l 1250 n part; cat part* | cmp - n && echo split
dd if=/dev/zero of=dd bs=4k count=10 conv=fsync 2>/dev/null
dd if=n of=dd bs=100 count=5 conv=notrunc oflag=append 2>/dev/null; wc -c < dd
truncate -s 1M t; stat -c %s t; ln t h; stat -c %h t; touch -d '2001-01-01 UTC' t; stat -c %Y t
chmod 640 t; stat -c %a t; install -m 700 n i; stat -c %a i
find . -name 'part*' | sort; df . > /dev/null && echo df; sync n && echo sync
mv n /dev/shm/corbel-run-moved.$$ && mv /dev/shm/corbel-run-moved.$$ n && wc -l n
xargs -n 1000 echo < n | wc -l
tar czf a.tgz n s.sh; mkdir x; tar xzf a.tgz -C x; cmp n x/n && echo tar
cp -a x y; diff -r x y && echo cp; rm -rf x y; ls -d x 2>/dev/null || echo rm

echo "== sqlite3"
if command -v sqlite3 > /dev/null; then
    for mode in delete wal; do
        sqlite3 $mode.db "pragma journal_mode=$mode; create table t(a);
            insert into t values(1),(2); select sum(a) from t; pragma integrity_check"
    done
fi

echo "== git"
if command -v git > /dev/null; then
    export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=n@n \
        GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=n@n
    git init -q g && cd g || exit 1
    for i in 1 2 3; do echo $i > f$i; git add .; git commit -qm $i; done
    git log --oneline | wc -l; git fsck 2>/dev/null && git gc -q && git status --short
    git clone -q . ../g2 && ls ../g2; cd ..
fi

echo "== python"
if command -v python3 > /dev/null; then
    python3 - <<'P'
import mmap, multiprocessing, os, shutil, sqlite3, subprocess, tempfile
open('p', 'w').write('0123456789')
with open('o', 'w') as o: subprocess.run(['echo', 'child'], stdout=o)
print(open('o').read(), subprocess.check_output(['cat', 'o'], cwd='.'))
with open('p', 'r+b') as f:
    m = mmap.mmap(f.fileno(), 10); m[0:3] = b'abc'; m.flush(); print(open('p').read())
with tempfile.TemporaryFile(dir='.') as f: f.write(b'tmp'); f.seek(0); print(f.read())
def work(i): open(f'mp{i}', 'w').write(str(i) * 100)
ps = [multiprocessing.Process(target=work, args=(i,)) for i in range(4)]
[p.start() for p in ps]; [p.join() for p in ps]
print(sum(os.path.getsize(f'mp{i}') for i in range(4)))
c = sqlite3.connect('p.db'); c.execute('pragma journal_mode=wal'); c.execute('create table t(a)')
c.executemany('insert into t values(?)', [(i,) for i in range(500)]); c.commit()
print(sqlite3.connect('p.db').execute('select sum(a) from t').fetchone()); c.close()
fd = os.open('.', os.O_RDONLY); os.fchdir(fd); print(os.path.basename(os.getcwd()))
print('p' in os.listdir(fd), os.open('p', os.O_RDONLY, dir_fd=fd) > 0)
to = [(os.POSIX_SPAWN_OPEN, 9, 'spawned', os.O_WRONLY | os.O_CREAT, 0o644)]
os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', 'echo hi >&9'], os.environ, file_actions=to), 0)
print(open('spawned').read()); os.makedirs('a/b/c'); shutil.rmtree('a'); print(os.path.exists('a'))
P
fi

echo "== cc"
if command -v cc > /dev/null; then
    printf '#include <stdio.h>\nint main(void){puts("compiled");}\n' > h.c; cc h.c -o h && ./h
fi
exit 7

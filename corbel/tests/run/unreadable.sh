# Programs that do not load the library, in ways that exec does not show at first: what they have open is the file.
cd "$1" || exit 1
static=$2 place=$3
cp "$static" "$place/secret"; chmod 4711 "$place/secret"
cp "$static" "$place/unread"; chmod 711 "$place/unread"
# As somebody who may execute and not read them.
mkdir -m 777 home
as="setpriv --reuid=1000 --regid=1000 --clear-groups sh -c"
$as "$place/secret echo set-id > home/a; cat home/a"
$as "$place/unread echo unreadable > home/b; cat home/b"
# By a descriptor alone.
python3 -c "
import os, sys
fd = os.open('$static', os.O_RDONLY)
out = os.open('c', os.O_WRONLY | os.O_CREAT, 0o644)
os.dup2(out, 1)
os.execve(fd, ['static', 'echo', 'by descriptor'], os.environ)"
cat c
python3 -c "
import os
fd = os.open('/bin/echo', os.O_PATH)
os.dup2(os.open('d', os.O_WRONLY | os.O_CREAT, 0o644), 1)
os.execve(fd, ['echo', 'dynamic'], os.environ)"
cat d
# A program of the volume that may only be executed cannot be written to while it runs.
cp "$static" runs; chmod 711 runs; chown 1000 runs

# What corbel send and corbel receive are told to do by transfer.rs: a directory of one volume changes at random, is sent snapshot by snapshot
# through streams that are cut and receivers that are killed, and is then in the other volume what it was in the first.
# Arguments: corbel, socket and mount of the one, socket and mount of the other, seed, rounds.
import json, os, random, shutil, stat, subprocess, sys, threading

CORBEL, SOCKET, MOUNT, SOCKET_B, MOUNT_B, SEED, ROUNDS = sys.argv[1:]
random.seed(int(SEED))
SRC, COPY = MOUNT + '/src', MOUNT_B + '/copy'


def corbel(verb, *args, socket=SOCKET, **more):
    command = [CORBEL, *verb, '--socket', socket, *args]
    return subprocess.run(command, capture_output=True, timeout=120, **more)


def paths():
    files, dirs = [], [SRC]
    for top, d, f in os.walk(SRC):
        files += [os.path.join(top, name) for name in f]
        dirs += [os.path.join(top, name) for name in d]
    return files, dirs


def change():
    files, dirs = paths()
    new = os.path.join(random.choice(dirs), 'n%d' % random.randrange(40))
    what = random.randrange(15)
    file = random.choice(files) if files else None
    regular = file and not os.path.islink(file) and stat.S_ISREG(os.lstat(file).st_mode)
    if what < 3 and not os.path.lexists(new):
        with open(new, 'wb') as f:
            f.write(os.urandom(random.randrange(60000)))
    elif what == 3:
        os.mkdir(new)
    elif what == 4 and file:
        os.rename(file, new)
    elif what == 5 and dirs[1:]:
        os.rename(random.choice(dirs[1:]), new)
    elif what == 6 and file:
        os.unlink(file)
    elif what == 7 and dirs[1:] and random.random() < .3:
        shutil.rmtree(random.choice(dirs[1:]))
    elif what == 8 and file:
        os.link(file, new, follow_symlinks=False)
    elif what == 9 and regular:
        with open(file, 'r+b') as f:
            f.seek(random.randrange(100000))
            f.write(os.urandom(random.randrange(9000)))
            if random.random() < .3:
                f.truncate(random.randrange(50000))
    elif what == 10:
        os.symlink('x' * random.randrange(1, 50), new)
    elif what == 11 and (file or dirs):
        one = random.choice(files + dirs)
        if not os.path.islink(one):
            os.chown(one, random.randrange(3), random.randrange(3))
            os.chmod(one, random.choice([0o600, 0o644, 0o4755, 0o700, 0o755]))
    elif what == 12 and regular:
        os.setxattr(file, 'user.' + random.choice('ab'), os.urandom(random.randrange(3000)))
        os.utime(file, (random.randrange(1 << 31), random.randrange(1 << 31)))
    elif what == 13:
        random.choice([os.mkfifo, lambda at: os.mknod(at, 0o020600, 0x103)])(new)
    elif what == 14 and regular:
        os.removexattr(file, 'user.a')
    # Out of the directory, and into it again.
    if random.random() < .05 and dirs[1:]:
        os.rename(random.choice(dirs[1:]), MOUNT + '/out%d' % random.randrange(9))
    out = [name for name in os.listdir(MOUNT) if name.startswith('out')]
    if random.random() < .05 and out:
        os.rename(MOUNT + '/' + random.choice(out), new)


def tree(top):
    all, links, todo = {}, {}, [top]
    while todo:
        at = todo.pop()
        name, s = os.path.relpath(at, top), os.lstat(at)
        names = os.listxattr(at, follow_symlinks=False)
        what = {
            'stat': [s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns, s.st_rdev],
            'xattrs': sorted((name, os.getxattr(at, name, follow_symlinks=False)) for name in names),
        }
        if stat.S_ISDIR(s.st_mode):
            todo += [os.path.join(at, name) for name in os.listdir(at)]
        else:
            what['size'], what['links'] = s.st_size, links.setdefault(s.st_ino, [])
            what['links'].append(name)
        if stat.S_ISREG(s.st_mode):
            with open(at, 'rb') as f:
                what['content'] = f.read()
        if stat.S_ISLNK(s.st_mode):
            what['target'] = os.readlink(at)
        all[name] = what
    for names in links.values():
        names.sort()
    return all


def resume():
    told = corbel(['receive'], '--status', '/copy', '--json', socket=SOCKET_B)
    said = json.loads(told.stdout) if told.returncode == 0 else {}
    if said.get('coming'):
        return ['--resume', said['coming']['position']], None
    return [], (said.get('complete') or {}).get('name')


def receive(name, before):
    go_on, tries = [], 0
    while True:
        sent = corbel(['send'], name, *(['--from', before] if before else []), *go_on)
        assert sent.returncode == 0, sent.stderr
        tries += 1
        if tries < 6 and random.random() < .3:
            # Killed at any moment.
            command = [CORBEL, 'receive', '--socket', SOCKET_B, '/copy']
            one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            timer = threading.Timer(random.random() * .15, one.kill)
            timer.start()
            one.communicate(sent.stdout, timeout=60)
            timer.cancel()
            go_on, complete = resume()
            if complete == name:
                return
            continue
        cut = tries < 6 and random.random() < .5
        data = sent.stdout[:random.randrange(len(sent.stdout))] if cut else sent.stdout
        done = corbel(['receive'], '/copy', socket=SOCKET_B, input=data)
        assert done.returncode == (1 if cut else 0), (cut, go_on, done)
        if not cut:
            return
        go_on, _ = resume()
        if random.random() < .2:
            go_on = []


os.mkdir(SRC)
before = None
for at in range(int(ROUNDS)):
    for _ in range(random.randrange(10, 200)):
        try:
            change()
        except OSError:
            pass
    name = 'snapshot %d' % at
    made = corbel(['snapshot'], 'create', name, '--dir', '/src')
    assert made.returncode == 0, made
    receive(name, before)
    right = tree(MOUNT + '/.corbel/snapshots/' + name)
    for copy in [COPY, MOUNT_B + '/.corbel/snapshots/' + name]:
        has = tree(copy)
        wrong = [(path, right.get(path), has.get(path)) for path in sorted(set(right) | set(has)) if right.get(path) != has.get(path)]
        assert not wrong, (SEED, at, copy, str(wrong[:3])[:3000])
    before = name
print('the same')

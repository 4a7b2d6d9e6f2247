"""Where data and holes of a file are, while it is written, reserved, punched and cut at any offsets: what lseek(2) says
after each step is what blocks make of it, whether they have been given to the file by then or not. `look`: the same
of the files that are there."""
import ctypes, errno, os, random, sys

libc = ctypes.CDLL(None, use_errno=True)
BLOCK, BLOCKS = 4096, 12
END = BLOCK * BLOCKS
KEEP_SIZE, PUNCH = 1, 2


def fallocate(fd, mode, offset, length):
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if libc.fallocate(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), 'fallocate')


def seek(fd, at, whence):
    try:
        return os.lseek(fd, at, whence)
    except OSError as error:
        return -error.errno


def judge(fd, size, blocks, what):
    assert os.fstat(fd).st_size == size, (what, os.fstat(fd).st_size, size)
    for at in [0, 1, size - 1, size, size + 1, -1] + [n * 3331 for n in range(END // 3331)]:
        for whence, wanted in ((os.SEEK_DATA, True), (os.SEEK_HOLE, False)):
            where = [max(b * BLOCK, at) for b in range(at // BLOCK, -(-size // BLOCK)) if blocks[b] == wanted]
            want = where[0] if where else -errno.ENXIO if wanted else size
            if not 0 <= at < size:
                want = -errno.ENXIO
            found = seek(fd, at, whence)
            assert found == want, f'{what}: from {at}, {"data" if wanted else "hole"}: {found}, not {want} ({blocks})'


def steps(seed):
    name = f'seek-{seed}'
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    rng = random.Random(seed)
    size, blocks = 0, [False] * (BLOCKS + 4)
    done = []

    def write(byte, at, length):
        nonlocal size
        assert os.pwrite(fd, byte * length, at) == length
        size = max(size, at + length)
        blocks[at // BLOCK:-(-(at + length) // BLOCK)] = [True] * (-(-(at + length) // BLOCK) - at // BLOCK)

    for _ in range(25):
        at, count = rng.randrange(END), rng.randrange(1, 4)
        first = at // BLOCK
        end = min(first + count, BLOCKS)
        what = rng.choice(['byte', 'byte', 'write', 'write', 'block', 'punch', 'part', 'reserve', 'cut', 'sync', 'again'])
        if what == 'byte':
            write(b'x', at, 1)
        elif what == 'write':
            write(b'w', at, rng.randrange(1, 3 * BLOCK))
        elif what == 'block':
            write(b'b', first * BLOCK, (end - first) * BLOCK)
        elif what == 'punch':
            fallocate(fd, PUNCH | KEEP_SIZE, first * BLOCK, (end - first) * BLOCK)
            blocks[first:end] = [False] * (end - first)
        elif what == 'part':
            # Not all that is in a block (what becomes of one of which nothing is left may be either).
            write(b'p', first * BLOCK, BLOCK)
            fallocate(fd, PUNCH | KEEP_SIZE, first * BLOCK + 5, rng.randrange(1, BLOCK - 5))
        elif what == 'reserve':
            mode = rng.choice([0, KEEP_SIZE])
            fallocate(fd, mode, at, 2 * BLOCK)
            size = max(size, 0 if mode else at + 2 * BLOCK)
        elif what == 'cut':
            if at % BLOCK:
                write(b'c', first * BLOCK, 1)
            os.ftruncate(fd, at)
            size, first = at, -(-at // BLOCK)
            blocks[first:] = [False] * (len(blocks) - first)
        elif what == 'sync':
            os.fsync(fd)
        else:
            os.close(fd)
            fd = os.open(name, os.O_RDWR)
        done.append(f'{what} {at} {count}')
        judge(fd, size, blocks, f'{seed}: {done}')
    os.close(fd)
    return size, blocks


if sys.argv[1:] == ['look']:
    for seed, (size, blocks) in enumerate(map(eval, open('seeks'))):
        with open(f'seek-{seed}', 'rb') as file:
            judge(file.fileno(), size, blocks, f'{seed}')
else:
    seeks = [steps(seed) for seed in range(20)]
    with open('seeks', 'w') as file:
        file.writelines(f'{line}\n' for line in seeks)
print('right')

"""Extended attributes as long as they may be, and longer; `look` finds on another node what was set; `change`
and `watch` change a long one and read it at the same time."""
import ctypes, errno, os, sys

SIZE_MAX = LIST_MAX = 65536
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    done = getattr(libc, name)(*args)
    return done if done >= 0 else -ctypes.get_errno()


def value(length, salt=0):
    return bytes((i * 7 + i // 256 + salt) % 256 for i in range(length))


def get(name, room):
    buffer = ctypes.create_string_buffer(max(room, 1))
    found = call('getxattr', b'file', name, buffer, ctypes.c_size_t(room))
    return buffer.raw[:found] if found > 0 and room else found


def listed(room):
    buffer = ctypes.create_string_buffer(max(room, 1))
    found = call('listxattr', b'file', buffer, ctypes.c_size_t(room))
    return sorted(buffer.raw[:found].split(b'\0')[:-1]) if found > 0 and room else found


def is_set(name, data, flags=0):
    return call('setxattr', b'file', name, data, ctypes.c_size_t(len(data)), flags)


SIZES = [0, 1, 3000, 4096, 57000, 61439, 61440, 61441, 63000, 65535, 65536]
ROUNDS = 60


def write():
    open('file', 'w').close()
    for size in SIZES:
        name = b'user.%d' % size
        assert is_set(name, value(size, size)) == 0, size
        assert get(name, 0) == size and (get(name, SIZE_MAX) or b'') == value(size, size), size
        assert size < 2 or get(name, size - 1) == -errno.ERANGE, size
    assert is_set(b'user.more', bytes(SIZE_MAX + 1)) == -errno.E2BIG
    assert get(b'user.more', 100) == get(b'user.more', 0) == -errno.ENODATA
    assert is_set(b'user.' + b'n' * 251, b'') == -errno.ERANGE and is_set(b'', b'') == -errno.ERANGE
    # A long one in place of a long one, a short one, and none.
    assert is_set(b'user.65536', value(65000, 1), 2) == 0 and get(b'user.65536', SIZE_MAX) == value(65000, 1)
    assert is_set(b'user.65536', b'short') == 0 and get(b'user.65536', SIZE_MAX) == b'short'
    assert is_set(b'user.65536', b'', 1) == -errno.EEXIST
    assert call('removexattr', b'file', b'user.65535') == 0
    assert is_set(b'user.65535', b'', 2) == get(b'user.65535', 9) == -errno.ENODATA
    for size in SIZES:
        if size < 65535:
            assert call('removexattr', b'file', b'user.%d' % size) == 0
    assert is_set(b'user.65536', value(65536)) == 0
    # The list is as long as a list may be, to the byte; then longer, when nothing can be said but that.
    names = [b'user.%0245d' % n for n in range(LIST_MAX // 251)] + [b'user.65536']
    names.append(b'user.' + b'l' * (LIST_MAX - sum(len(name) + 1 for name in names) - len(b'user.\0')))
    names.sort()
    for name in names:
        assert is_set(name, b'x' if name != b'user.65536' else value(65536)) == 0
    assert listed(0) == LIST_MAX and listed(LIST_MAX) == names, listed(0)
    assert listed(100) == listed(LIST_MAX - 1) == -errno.ERANGE
    assert is_set(b'user.over', b'') == 0
    assert listed(LIST_MAX) == listed(1 << 20) == -errno.E2BIG and listed(0) == LIST_MAX and listed(9) == -errno.ERANGE
    assert call('removexattr', b'file', b'user.over') == 0
    os.sync()


def look():
    assert get(b'user.65536', SIZE_MAX) == value(65536)
    found = listed(LIST_MAX)
    assert len(found) > 250 and sum(len(name) + 1 for name in found) == LIST_MAX


def round_of(found):
    """Which round of `change` a value is of."""
    length = len(found)
    return next(n for n in range(ROUNDS) if found == bytes([65 + n % 26]) * length and length == SIZE_MAX - n * 200)


def change():
    for n in range(ROUNDS):
        assert is_set(b'user.long', bytes([65 + n % 26]) * (SIZE_MAX - n * 200)) == 0


def watch():
    seen, rounds = -1, set()
    for _ in range(100_000):
        found = get(b'user.long', SIZE_MAX)
        if found == -errno.ENODATA:
            continue
        seen, before = round_of(found), seen
        assert seen >= before, f'{seen} after {before}'
        rounds.add(seen)
        if seen == ROUNDS - 1:
            break
    print(len(rounds), file=sys.stderr)


{'write': write, 'look': look, 'change': change, 'watch': watch}[sys.argv[1]]()
print('right')

#!/usr/bin/python3
"""Power cuts, made from what dm-log-writes has recorded of a device.

A writer says by a mark in the log what was durable when it was answered. A power cut leaves all that was flushed before it, of what
was written since any part, in any order, torn at sectors; that is made here, and judged.

  power.py raw DEVICE EXPECTED --seed N --seconds N [--count N] [--log NAME]
                                                                  writes to a disk, and marks what was flushed, until so many marks are put
  power.py judge LOG EXPECTED [--forget N]                        all power cuts of that log, sector by sector
  power.py disk DEVICE EXPECTED MARK                              what is on a disk after a power cut behind that mark
  power.py files DIR --seed N --seconds N [--count N] [--log NAME]
                                                                  writes files, and marks what was synced; prints the last mark
  power.py points LOG COUNT SEED                                  moments for power cuts
  power.py cut LOG TARGET POINT SEED [--forget N]                 makes TARGET what it is after a cut there; prints the last mark before
  power.py look DIR MARK SEED                                     whether files are there that were synced before the mark

--forget N is a log that is not true: of the writes of each Nth flush nothing reached the disk. It must be found.
"""
import argparse
import fcntl
import mmap
import os
import random
import struct
import sys
import threading
import time

SECTOR = 512

# ---- The log: drivers/md/dm-log-writes.c ----

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8


class Log:
    """Entries are (flags, sector, sectors, where the data begins), of marks (MARK, text)."""

    def __init__(self, path):
        self.file = open(path, "rb", buffering=0)
        magic, version, count, size = struct.unpack("<QQQI", self.file.read(28))
        if magic != MAGIC or version != 1:
            sys.exit(f"{path} is no log: magic {magic:#x}, version {version}")
        self.scale = size // SECTOR
        self.entries = []
        at = size
        for _ in range(count):
            head = os.pread(self.file.fileno(), SECTOR, at)
            sector, sectors, flags, length = struct.unpack_from("<QQQQ", head)
            at += size
            if flags & MARK:
                # (The last one is the target's own.)
                text = head[32 : 32 + length].rstrip(b"\0").decode()
                if text != "dm-log-writes-end":
                    self.entries.append((MARK, text))
                continue
            self.entries.append((flags, sector * self.scale, sectors * self.scale, at))
            if not flags & DISCARD:
                at += sectors * size

    def data(self, entry):
        return os.pread(self.file.fileno(), entry[2] * SECTOR, entry[3])


def forgetful(entries, every):
    """The entries, without the writes that each such flush made durable."""
    if not every:
        return entries
    kept, since, flushes = [], [], 0
    for entry in entries:
        since.append(entry)
        if entry[0] & FLUSH:
            flushes += 1
            lost = flushes % every == 0
            kept += [e for e in since if not lost or e[0] & MARK or e[0] & FUA or e is entry]
            since = []
    return kept + since


# ---- Marks ----


class Marker:
    """Puts marks in the log of a dm-log-writes target, by DM_TARGET_MSG; without a name keeps the last.

    What was written is in the log with the first flush that comes after it, where that flush ends: of two that are under way together
    the first may stand in the log behind the second, with what both of them made durable. So a mark is put while no flush is under way. Who
    does not know that of all that flushes waits until nothing is under way at all (`quiet`)."""

    def __init__(self, name, quiet=False):
        self.name, self.last, self.inflight = name, "0", None
        self.control = os.open("/dev/mapper/control", os.O_RDWR) if name else None
        if name and quiet:
            self.inflight = f"/sys/dev/block/{os.major(n := os.stat(f'/dev/mapper/{name}').st_rdev)}:{os.minor(n)}/inflight"

    def is_quiet(self):
        with open(self.inflight) as file:
            return file.read().split() == ["0", "0"]

    def put(self, text):
        self.last = text
        if self.control is None:
            return
        quiet, until = 0, time.monotonic() + 30
        while self.inflight and quiet < 3:
            if time.monotonic() > until:
                raise OSError("something is under way for 30 s: no mark can be put")
            quiet = quiet + 1 if self.is_quiet() else 0
            time.sleep(0.003)
        message = struct.pack("<Q", 0) + f"mark {text}".encode() + b"\0"
        size = 312 + len(message)
        head = struct.pack("<3IIIIiIIIQ128s129s7s", 4, 0, 0, size, 312, 0, 0, 0, 0, 0, 0, self.name.encode(), b"", b"")
        fcntl.ioctl(self.control, 0xC138FD0E, bytearray(head + message), True)


# ---- A disk ----

HEAD = struct.Struct("<8sQQQ")
BLKDISCARD, BLKZEROOUT = 0x1277, 0x127F


def content(sector, generation):
    return HEAD.pack(b"corbel\r\n", sector, generation, sector * 0x9E3779B97F4A7C15 + generation & (1 << 64) - 1) * (SECTOR // HEAD.size)


ZERO = bytes(SECTOR)


def generation(sector, data):
    """Which write a sector is of; 0 of zeroes, None of what nobody has written there."""
    if data == ZERO:
        return 0
    _, _, number, _ = HEAD.unpack_from(data)
    return number if data == content(sector, number) else None


class Raw:
    """Threads that write to places of their own, and flush for all.

    What they did is written down as it happened: `s` a write was begun (its number, sector, sectors, kind: w, z zeroes, d discarded), `c` it was
    answered, `u` it was and is durable by that, `f` a flush was begun, `a` it was answered, `m` a mark was put for all these."""

    def __init__(self, args):
        self.args = args
        self.fd = os.open(args.device, os.O_RDWR | os.O_DIRECT)
        self.sectors = os.lseek(self.fd, 0, os.SEEK_END) // SECTOR
        self.lock = threading.Lock()
        self.events, self.number = [], 0
        self.marker = Marker(args.log, args.quiet)
        # Flushes under way.
        self.flushing = 0
        self.deadline = time.monotonic() + args.seconds
        self.marks, self.failure = 0, None

    def event(self, text):
        with self.lock:
            self.events.append(text)

    def mark(self, text):
        """What makes durable was answered: when all that were under way are, there is a mark for them."""
        with self.lock:
            self.flushing -= 1
            self.events.append(text)
            if self.flushing:
                return
            self.marks += 1
            self.marker.put(str(self.marks))
            self.events.append(f"m {self.marks}")
            if self.marks >= self.args.count:
                self.deadline = 0

    def place(self, rng, thread):
        """One of the thread's own places: of 49 sectors each, so that pages are shared; the first thread has a quarter of the disk as well."""
        shared = self.sectors * 3 // 4
        if thread == 0 and rng.random() < 0.3:
            first = rng.randrange(shared, self.sectors)
            return first, min(rng.choice((8, 64, 256, 1024)), self.sectors - first)
        areas = shared // 49
        area = rng.randrange(areas // self.args.threads) * self.args.threads + thread
        # Some are written again and again.
        if rng.random() < 0.5:
            area = area % (16 * self.args.threads) // self.args.threads * self.args.threads + thread
        first = rng.randrange(49)
        count = rng.randint(1, 49 - first)
        if rng.random() < 0.4:
            count = min(count, 8)
        return area * 49 + first, count

    def run(self, thread):
        rng = random.Random(self.args.seed * 1000 + thread)
        buffer = mmap.mmap(-1, 1024 * SECTOR)
        try:
            while time.monotonic() < self.deadline:
                what = rng.random()
                if what < 0.14:
                    with self.lock:
                        self.number += 1
                        number = self.number
                        self.flushing += 1
                        self.events.append(f"f {number}")
                    os.fsync(self.fd)
                    self.mark(f"a {number}")
                    continue
                first, count = self.place(rng, thread)
                kind = "z" if what < 0.2 else "d" if what < 0.23 else "w"
                with self.lock:
                    self.number += 1
                    number = self.number
                    durable = kind == "w" and rng.random() < 0.1
                    self.flushing += durable
                    self.events.append(f"s {number} {first} {count} {kind}")
                if kind != "w":
                    span = struct.pack("<QQ", first * SECTOR, count * SECTOR)
                    fcntl.ioctl(self.fd, BLKZEROOUT if kind == "z" else BLKDISCARD, span)
                    self.event(f"c {number}")
                    continue
                for i in range(count):
                    buffer[i * SECTOR : (i + 1) * SECTOR] = content(first + i, number)
                flags = os.RWF_DSYNC if durable else 0
                done = os.pwritev(self.fd, [memoryview(buffer)[: count * SECTOR]], first * SECTOR, flags)
                if done != count * SECTOR:
                    raise OSError(f"{done} of {count * SECTOR} bytes")
                if durable:
                    self.mark(f"u {number}")
                else:
                    self.event(f"c {number}")
        except OSError as error:
            self.failure = error
            self.deadline = 0

    def main(self):
        threads = [threading.Thread(target=self.run, args=(n,)) for n in range(self.args.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with open(self.args.expected, "w") as file:
            file.write(f"{self.sectors}\n" + "\n".join(self.events) + "\n")
        if self.failure and not self.args.may_fail:
            sys.exit(f"{self.args.device}: {self.failure}")
        print(f"{self.number} requests, {self.marks} marks; last {self.marker.last}")


class Expected:
    """What must be there behind each mark, from what the writer wrote down."""

    def __init__(self, path):
        with open(path) as file:
            self.sectors = int(file.readline())
            self.events = [line.split() for line in file]
        # The last write of each sector, and its last zeroes: of which write some are is not to be seen.
        self.newest, self.zeroes = {}, {}
        for kind, number, *rest in self.events:
            if kind == "s":
                first, count = int(rest[0]), int(rest[1])
                for sector in range(first, first + count):
                    self.newest[sector] = int(number)
                    if rest[2] != "w":
                        self.zeroes[sector] = int(number)

    def marks(self):
        """Each mark with {sector: the oldest write that it may be of}, and the sectors that may be anything until the next one."""
        written, done, flushing = {}, {}, {}
        mark, wanted, loose, answered = "0", {}, set(), []
        for kind, number, *rest in self.events:
            if kind == "s":
                span = range(int(rest[0]), int(rest[0]) + int(rest[1]))
                written[number] = span
                if rest[2] != "d":
                    continue
                # Nothing is promised of it, until it is written again.
                written[number] = range(0)
                loose.update(span)
                for known in (done, *flushing.values(), *answered):
                    for sector in span:
                        known.pop(sector, None)
            elif kind == "c":
                done.update(dict.fromkeys(written.pop(number), int(number)))
            elif kind == "f":
                # (What is durable already is in it, too, which is no harm.)
                flushing[number] = dict(done)
            elif kind == "u":
                span = dict.fromkeys(written.pop(number), int(number))
                done.update(span)
                answered.append(span)
            elif kind == "a":
                answered.append(flushing.pop(number))
            else:
                yield mark, wanted, loose
                mark, wanted, loose = number, {}, set()
                for known in answered:
                    raise_to(wanted, known)
                answered = []
        yield mark, wanted, loose

    def wrong(self, sector, number, needed):
        """Why a sector may not be what it is, if there must be that write at least."""
        if number is None:
            return "is what nobody has written"
        if number == 0:
            number = self.zeroes.get(sector, 0)
        if number > self.newest.get(sector, 0):
            return f"is of write {number}, which was never begun"
        return f"is of write {number}, and was flushed with write {needed}" if number < needed else None


def raise_to(needed, wanted):
    """What must be there from now on; returns the sectors of which that is new."""
    changed = []
    for sector, number in wanted.items():
        if number > needed.get(sector, 0):
            needed[sector] = number
            changed.append(sector)
    return changed


def judge(args):
    log, expected = Log(args.log), Expected(args.expected)
    entries = forgetful(log.entries, args.forget)
    marks = expected.marks()
    # What each sector may be after a power cut: what was flushed, or anything written since.
    possible, unflushed, needed, loose = {}, [], {}, set()
    wrong, looked, flushes, seen, cuts = [], 0, 0, 0, 0

    def look(sector, where):
        nonlocal looked
        for number in possible.get(sector, (0,)):
            looked += 1
            why = expected.wrong(sector, number, needed.get(sector, 0))
            if why and sector not in loose:
                wrong.append(f"behind mark {where}: sector {sector} {why}")

    _, _, loose = next(marks)
    last = "0"
    for entry in entries:
        if entry[0] & MARK:
            text, wanted, now_loose = next(marks)
            if text != entry[1]:
                sys.exit(f"the log has mark {entry[1]} where {text} was put")
            last, seen = text, seen + 1
            # What was discarded is as it may be until it is written again.
            for sector in loose:
                needed.pop(sector, None)
            loose = now_loose
            for sector in raise_to(needed, wanted):
                look(sector, last)
            continue
        flags, first, count, _ = entry
        if flags & FLUSH:
            flushes += 1
            for sector in unflushed:
                del possible[sector][:-1]
            unflushed = []
        if count == 0:
            continue
        cuts += 1
        data = ZERO * count if flags & DISCARD else log.data(entry)
        for i in range(count):
            sector = first + i
            number = generation(sector, data[i * SECTOR : (i + 1) * SECTOR])
            if flags & FUA:
                possible[sector] = [number]
            else:
                possible.setdefault(sector, [0]).append(number)
                unflushed.append(sector)
            look(sector, last)
    if flushes == 0 or seen < 2:
        wrong.append(f"{flushes} flushes and {seen} marks: nothing was looked at")
    print(f"{cuts} writes, {flushes} flushes, {seen} marks, {looked} states of sectors, {len(wrong)} wrong")
    for line in wrong[:8]:
        print(line)
    sys.exit(1 if wrong else 0)


def disk(args):
    """A disk after a power cut behind a mark, which is one of all that may be."""
    expected = Expected(args.expected)
    needed = {}
    loose = set()
    for text, wanted, now_loose in expected.marks():
        for sector in loose:
            needed.pop(sector, None)
        loose = now_loose
        raise_to(needed, wanted)
        if text == args.mark:
            break
    else:
        sys.exit(f"mark {args.mark} was never put")
    wrong = []
    with open(args.device, "rb", buffering=0) as file:
        for first in range(0, expected.sectors, 2048):
            data = file.read(2048 * SECTOR)
            for i in range(0, len(data), SECTOR):
                sector = first + i // SECTOR
                why = expected.wrong(sector, generation(sector, data[i : i + SECTOR]), needed.get(sector, 0))
                if why and sector not in loose:
                    wrong.append(f"behind mark {args.mark}: sector {sector} {why}")
    print(f"{len(needed)} sectors flushed, {len(wrong)} wrong")
    for line in wrong[:8]:
        print(line)
    sys.exit(1 if wrong else 0)


# ---- Files ----

RING = 64
BLOCK = 4096


def file_content(seed, number):
    rng = random.Random(seed * 1000003 + number)
    return (f"{seed} {number} ".encode() * 8000)[: rng.randint(1, 60000)]


def block_content(block, number):
    return b"".join(content(block * 8 + i, number) for i in range(8))


def files(args):
    """Number n is a file, a file that was renamed, or a block of a file that is written over: each durable when it is marked."""
    rng = random.Random(args.seed)
    marker = Marker(args.log, args.quiet)
    deadline = time.monotonic() + args.seconds
    number = 0
    try:
        dir_fd = os.open(args.dir, os.O_RDONLY)
        ring = os.open(f"{args.dir}/ring", os.O_RDWR | os.O_CREAT)
        os.write(ring, bytes(RING * BLOCK))
        os.fsync(ring)
        os.fsync(dir_fd)
        marker.put("1")
        number = 1
        while time.monotonic() < deadline and number < args.count:
            number += 1
            # What nobody has synced.
            if rng.random() < 0.5:
                with open(f"{args.dir}/noise-{rng.randrange(8)}", "wb") as noise:
                    noise.write(rng.randbytes(rng.randint(1, 200000)))
            elif rng.random() < 0.3:
                try:
                    os.remove(f"{args.dir}/noise-{rng.randrange(8)}")
                except FileNotFoundError:
                    pass
            if number % 3 == 0:
                os.pwrite(ring, block_content(number % RING, number), number % RING * BLOCK)
                os.fdatasync(ring)
            else:
                name = f"{args.dir}/{number}"
                with open(name if number % 3 == 1 else f"{name}.new", "wb") as file:
                    file.write(file_content(args.seed, number))
                    file.flush()
                    os.fsync(file.fileno())
                if number % 3 == 2:
                    os.rename(f"{name}.new", name)
                os.fsync(dir_fd)
            marker.put(str(number))
    except OSError as error:
        # The disk is gone, as it may be; where it may not somebody else looks.
        print(f"write {number}: {error}", file=sys.stderr)
        if not args.may_fail:
            sys.exit(1)
    print(marker.last)


def look(args):
    last = int(args.mark)
    wrong = []
    ring = b""
    if last >= 1:
        with open(f"{args.dir}/ring", "rb") as file:
            ring = file.read()
        if len(ring) != RING * BLOCK:
            wrong.append(f"ring has {len(ring)} bytes")
    blocks = {}
    for number in range(2, last + 1):
        if number % 3 == 0:
            blocks[number % RING] = number
            continue
        try:
            with open(f"{args.dir}/{number}", "rb") as file:
                if file.read() != file_content(args.seed, number):
                    wrong.append(f"file {number} is not what was written")
        except OSError as error:
            wrong.append(f"file {number}: {error}")
    for block, number in blocks.items():
        for i in range(8):
            at = block * BLOCK + i * SECTOR
            found = generation(block * 8 + i, ring[at : at + SECTOR])
            if found is None or found < number:
                wrong.append(f"block {block} of the ring is of write {found}, and was synced with {number}")
    print(f"{last} synced, {len(wrong)} wrong")
    for line in wrong[:8]:
        print(line)
    sys.exit(1 if wrong else 0)


# ---- Cuts ----


def points(args):
    """Just before flushes, where most is under way; at marks; anywhere."""
    log = Log(args.log)
    rng = random.Random(args.seed)
    count = len(log.entries)
    first = next((i for i, e in enumerate(log.entries) if e[0] & MARK), 0)
    chosen = set()
    flushes = [i for i, e in enumerate(log.entries) if e[0] & FLUSH and i > first]
    marks = [i + 1 for i, e in enumerate(log.entries) if e[0] & MARK]
    for n in range(args.count):
        pool = (flushes, marks, range(first + 1, count + 1))[n % 3]
        if pool:
            chosen.add(rng.choice(pool))
    print(*sorted(chosen))


def cut(args):
    log = Log(args.log)
    rng = random.Random(args.seed)
    entries = log.entries[: args.point]
    mark = next((e[1] for e in reversed(entries) if e[0] & MARK), "0")
    flushed = max((i for i, e in enumerate(entries) if e[0] & FLUSH), default=-1)
    kept = {id(e) for e in forgetful(entries, args.forget)}
    share = rng.choice((0, 0.5, 1))
    with open(args.target, "r+b", buffering=0) as target:
        for i, entry in enumerate(entries):
            if entry[0] & MARK or entry[2] == 0 or id(entry) not in kept:
                continue
            flags, first, count, _ = entry
            data = bytes(count * SECTOR) if flags & DISCARD else log.data(entry)
            begin, end = 0, count
            if i > flushed and not flags & FUA:
                if rng.random() >= share:
                    continue
                if rng.random() < 0.2:
                    begin, end = sorted((rng.randrange(count + 1), rng.randrange(count + 1)))
            os.pwrite(target.fileno(), data[begin * SECTOR : end * SECTOR], (first + begin) * SECTOR)
        os.fsync(target.fileno())
    print(mark)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name, run, *names):
        sub = verbs.add_parser(name)
        for name in names:
            sub.add_argument(name, type=int if name in ("count", "seed", "point") else str)
        sub.set_defaults(run=run)
        return sub

    for sub in (verb("raw", lambda args: Raw(args).main(), "device", "expected"), verb("files", files, "dir")):
        sub.add_argument("--seed", type=int, required=True)
        sub.add_argument("--seconds", type=float, required=True)
        sub.add_argument("--count", type=int, default=1 << 62)
        sub.add_argument("--log")
        sub.add_argument("--quiet", action="store_true")
        sub.add_argument("--threads", type=int, default=3)
        sub.add_argument("--may-fail", action="store_true")
    verb("judge", judge, "log", "expected").add_argument("--forget", type=int, default=0)
    verb("disk", disk, "device", "expected", "mark")
    verb("points", points, "log", "count", "seed")
    verb("cut", cut, "log", "target", "point", "seed").add_argument("--forget", type=int, default=0)
    verb("look", look, "dir", "mark", "seed")
    args = parser.parse_args()
    args.run(args)


main()

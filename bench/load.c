/* The loads of `corbel bench`: an ordinary program that knows nothing of Corbel, compiled with cc
 * when a bench needs it. With -DCORBEL_LIBRARY the same loads go through the C library instead.
 *
 *   load persist PATH BYTES COUNT    bare cost: 4 KiB + 64-byte header, non-temporal, one fence
 *   load memcpy  PATH BYTES COUNT    bare cost: copy of a cold 4 KiB block
 *   load copy    PATH BYTES COUNT    bare cost: COUNT copies of BYTES into the memory of a file, one behind the other;
 *                                    timed as a whole
 *   load write   PATH BYTES COUNT    COUNT writes of BYTES in bursts, an fsync (not timed) between
 *   load append  PATH BYTES COUNT    COUNT times append BYTES + fsync
 *   load seq     PATH BYTES COUNT    COUNT sequential writes of BYTES, one fsync; timed as a whole
 *   load fill    PATH BYTES COUNT    as seq: makes the file that `read` reads
 *   load read    PATH BYTES COUNT    COUNT random reads of BYTES
 *   load mixed-P PATH BYTES COUNT    as seq, with bytes of which P percent can be compressed away
 *   load held-seq PATH BYTES COUNT   as seq, but with the file open says "ready" and waits for a byte on standard input
 *   load held-stream - BYTES MILLIS  as stream, likewise when its memory is there
 *   load sort-P  DIR  BYTES COUNT    sorts COUNT records of BYTES, a key of 10 and a rest so that P percent can be compressed away: four
 *                                    processes put them into files by ranges of keys, then four sort a range each (Tencent Sort's phases,
 *                                    each durable at its end); only the second is timed
 *   load rewrite PATH BYTES COUNT    COUNT times write the same 16 blocks of BYTES eight times over, then fsync
 *   load tmp     DIR  BYTES COUNT    COUNT times make, write, close and remove 16 files of BYTES, then fsync a file
 *   load files   DIR  BYTES COUNT    COUNT times create, write, fsync, close, unlink
 *   load mail    DIR  BYTES MILLIS   for so long: write a file of BYTES to DIR/tmp, fsync, rename it to DIR/new
 *   load varmail DIR  BYTES MILLIS   as a mail server: remove a file, write a new one and fsync, read one and append with fsync,
 *                                    read one (filebench's varmail, 100 files)
 *   load server  DIR  BYTES MILLIS   as a file server: write a file whole, append to one, read two, remove one, look at one (filebench's
 *                                    fileserver, 100 files)
 *   load stream  -    BYTES MILLIS   bare: passes over BYTES of memory, for so long
 *   load turns   PATH BYTES COUNT    two processes in turns, COUNT each: read what the other wrote, write it anew
 *   load peer-N  PATH BYTES COUNT TURN  one of the two, 0 or 1, on a node of its own; TURN is a file of this machine that tells whose turn it is
 *   load stride-K PATH BYTES MILLIS N SIZE  a checkpoint's writer, K of N: writes each Nth block of BYTES of the SIZE bytes of the file, from
 *                                    the Kth on, then fsync; again and again, for so long after the first time, which does not count
 *   load records PATH COUNT SECONDS  append numbered records with fsync, say each one acknowledged
 *   load verify  PATH                say which numbers are there
 *
 * Timed loads print one line of JSON; times are medians of single calls in nanoseconds, the cost of
 * reading the clock subtracted. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef CORBEL_LIBRARY
#include "corbel.h"
static corbel_t *volume;
#define fs_open(path, flags, mode) corbel_open(volume, path, flags, mode)
#define fs_pwrite(fd, buf, len, at) corbel_pwrite(volume, fd, buf, len, at)
#define fs_pread(fd, buf, len, at) corbel_pread(volume, fd, buf, len, at)
#define fs_write(fd, buf, len) corbel_write(volume, fd, buf, len)
#define fs_fsync(fd) corbel_fsync(volume, fd)
#define fs_close(fd) corbel_close(volume, fd)
#define fs_unlink(path) corbel_unlink(volume, path)
#define fs_rename(from, to) corbel_rename(volume, from, to)
static int fs_attach(void) {
    const char *socket = getenv("CORBEL_SOCKET");
    volume = corbel_connect(socket ? socket : "/run/corbel/corbel.sock");
    return volume ? 0 : -1;
}
#else
#define fs_open(path, flags, mode) open(path, flags, mode)
#define fs_pwrite(fd, buf, len, at) pwrite(fd, buf, len, at)
#define fs_pread(fd, buf, len, at) pread(fd, buf, len, at)
#define fs_write(fd, buf, len) write(fd, buf, len)
#define fs_fsync(fd) fsync(fd)
#define fs_close(fd) close(fd)
#define fs_unlink(path) unlink(path)
#define fs_rename(from, to) rename(from, to)
#define fs_attach() 0
#endif

enum { BURST = 512, RECORD = 4096 };

static char *buffer;
static uint64_t clock_cost;

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void measure_clock(void) {
    static uint64_t samples[1001];
    for (int i = 0; i < 1001; i++) {
        uint64_t start = now();
        samples[i] = now() - start;
    }
    qsort(samples, 1001, sizeof samples[0], by_value);
    clock_cost = samples[500];
}

static uint64_t next_random(void) {
    static uint64_t state = 0x9e3779b97f4a7c15u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void report(uint64_t *samples, size_t count, uint64_t took, size_t bytes) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        samples[i] = samples[i] > clock_cost ? samples[i] - clock_cost : 0;
        sum += samples[i];
    }
    qsort(samples, count, sizeof samples[0], by_value);
    printf("{\"ops\":%zu,\"bytes\":%zu,\"p50_ns\":%lu,\"p99_ns\":%lu,\"max_ns\":%lu,"
           "\"p999_ns\":%lu,\"mean_ns\":%lu,\"seconds\":%.6f}\n",
           count, bytes, samples[count / 2], samples[count - 1 - count / 100], samples[count - 1],
           samples[count - 1 - count / 1000], sum / count, (double)took / 1e9);
}

static char *map_file(const char *path, size_t bytes) {
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        die(path);
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (at == MAP_FAILED)
        die("mmap");
    return at;
}

__attribute__((target("sse2"))) static void stream_out(char *to, const char *from, size_t len) {
    for (size_t i = 0; i < len; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}

static void persist(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    size_t entry = bytes + 64, size = 64u << 20, at = 0;
    char *region = map_file(path, size), header[64] = "header";
    memset(region, 1, size);
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        if (at + entry > size)
            at = 0;
        uint64_t start = now();
        stream_out(region + at + 64, buffer, bytes);
        stream_out(region + at, header, 64);
        _mm_sfence();
        samples[i] = now() - start;
        at += entry;
    }
    report(samples, count, now() - begin, bytes);
}

static void copy_cold(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    struct stat st;
    if (stat(path, &st) != 0 || (size_t)st.st_size < bytes)
        die(path);
    size_t blocks = (size_t)st.st_size / bytes;
    char *region = map_file(path, (size_t)st.st_size);
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        const char *from = region + (next_random() % blocks) * bytes;
        uint64_t start = now();
        memcpy(buffer, from, bytes);
        __asm__ volatile("" : : "r"(buffer) : "memory");
        samples[i] = now() - start;
    }
    report(samples, count, now() - begin, bytes);
}

static void copy_behind(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    struct stat st;
    if (stat(path, &st) != 0 || (size_t)st.st_size < bytes)
        die(path);
    size_t blocks = (size_t)st.st_size / bytes;
    char *region = map_file(path, (size_t)st.st_size);
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        memcpy(region + (i % blocks) * bytes, buffer, bytes);
        __asm__ volatile("" : : "r"(region) : "memory");
    }
    report(samples, count, now() - begin, bytes);
}

static int open_or_die(const char *path, int flags) {
    int fd = fs_open(path, flags, 0644);
    if (fd < 0)
        die(path);
    return fd;
}

static void write_bursts(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    int fd = open_or_die(path, O_RDWR | O_CREAT);
    size_t window = 16u << 20;
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        off_t at = (off_t)((i * bytes) % window);
        uint64_t start = now();
        if (fs_pwrite(fd, buffer, bytes, at) != (ssize_t)bytes)
            die("pwrite");
        samples[i] = now() - start;
        if (i % BURST == BURST - 1 && fs_fsync(fd) != 0)
            die("fsync");
    }
    report(samples, count, now() - begin, bytes);
    fs_close(fd);
}

static void append_sync(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    int fd = open_or_die(path, O_WRONLY | O_CREAT | O_APPEND);
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        uint64_t start = now();
        if (fs_write(fd, buffer, bytes) != (ssize_t)bytes)
            die("write");
        if (fs_fsync(fd) != 0)
            die("fsync");
        samples[i] = now() - start;
    }
    report(samples, count, now() - begin, bytes);
    fs_close(fd);
}

/* Until whoever started this has heard that it is ready, and those beside it. */
static void wait_for_all(void) {
    char byte;
    if (puts("ready") < 0 || fflush(stdout) != 0 || read(0, &byte, 1) != 1)
        die("standard input");
}

static void sequential(const char *path, size_t bytes, size_t count, uint64_t *samples, int held) {
    int fd = open_or_die(path, O_WRONLY | O_CREAT);
    if (held)
        wait_for_all();
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        uint64_t start = now();
        if (fs_write(fd, buffer, bytes) != (ssize_t)bytes)
            die("write");
        samples[i] = now() - start;
    }
    if (fs_fsync(fd) != 0)
        die("fsync");
    report(samples, count, now() - begin, bytes);
    fs_close(fd);
}

/* Of each KiB `percent` are one byte again and again, and the rest is noise: 8 MiB of that, which no codec's window
 * spans. */
static void mixed(const char *path, size_t bytes, size_t count, uint64_t *samples, unsigned percent) {
    size_t pool = (size_t)8 << 20;
    uint8_t *noise = malloc(pool);
    if (noise == NULL || bytes > pool)
        die("memory");
    for (size_t i = 0; i < pool; i++)
        noise[i] = i % 1024 < 1024 * (size_t)percent / 100 ? 'c' : (uint8_t)(next_random() >> 24);
    int fd = open_or_die(path, O_WRONLY | O_CREAT);
    size_t at = 0;
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        uint64_t start = now();
        if (fs_write(fd, noise + at, bytes) != (ssize_t)bytes)
            die("write");
        samples[i] = now() - start;
        at = at + 2 * bytes <= pool ? at + bytes : 0;
    }
    if (fs_fsync(fd) != 0)
        die("fsync");
    report(samples, count, now() - begin, bytes);
    fs_close(fd);
}

/* Blocks that are written eight times between two fsyncs. */
static void rewrite(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    int fd = open_or_die(path, O_WRONLY | O_CREAT);
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        uint64_t start = now();
        for (size_t turn = 0; turn < 8; turn++)
            for (size_t block = 0; block < 16; block++) {
                buffer[0] = (char)(i + turn + block);
                if (fs_pwrite(fd, buffer, bytes, (off_t)(block * bytes)) != (ssize_t)bytes)
                    die("pwrite");
            }
        if (fs_fsync(fd) != 0)
            die("fsync");
        samples[i] = now() - start;
    }
    report(samples, count, now() - begin, 128 * bytes);
    fs_close(fd);
}

/* Files that are gone before the next fsync. */
static void temporary(const char *dir, size_t bytes, size_t count, uint64_t *samples) {
    char path[4096];
    snprintf(path, sizeof path, "%s/stays", dir);
    int stays = open_or_die(path, O_WRONLY | O_CREAT);
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        uint64_t start = now();
        for (size_t n = 0; n < 16; n++) {
            snprintf(path, sizeof path, "%s/tmp-%zu", dir, n);
            int fd = open_or_die(path, O_WRONLY | O_CREAT);
            if (fs_write(fd, buffer, bytes) != (ssize_t)bytes)
                die("write");
            fs_close(fd);
            if (fs_unlink(path) != 0)
                die("unlink");
        }
        if (fs_fsync(stays) != 0)
            die("fsync");
        samples[i] = now() - start;
    }
    report(samples, count, now() - begin, 16 * bytes);
    fs_close(stays);
}

static void random_reads(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    int fd = open_or_die(path, O_RDONLY);
    off_t size = 0;
    /* The size by reading, so that the library needs no more calls than the loads. */
    for (off_t step = (off_t)1 << 34; step >= (off_t)bytes; step /= 2)
        if (fs_pread(fd, buffer, 1, size + step - 1) == 1)
            size += step;
    size_t blocks = (size_t)size / bytes;
    if (blocks == 0)
        die("the file is empty");
    for (size_t i = 0; i < blocks; i++) /* warm: every block once */
        if (fs_pread(fd, buffer, bytes, (off_t)(i * bytes)) != (ssize_t)bytes)
            die("pread");
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        off_t at = (off_t)((next_random() % blocks) * bytes);
        uint64_t start = now();
        if (fs_pread(fd, buffer, bytes, at) != (ssize_t)bytes)
            die("pread");
        samples[i] = now() - start;
    }
    report(samples, count, now() - begin, bytes);
    fs_close(fd);
}

static void small_files(const char *dir, size_t bytes, size_t count, uint64_t *samples) {
    char path[4096];
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/f%zu", dir, i);
        uint64_t start = now();
        int fd = open_or_die(path, O_WRONLY | O_CREAT | O_EXCL);
        if (fs_write(fd, buffer, bytes) != (ssize_t)bytes || fs_fsync(fd) != 0 ||
            fs_close(fd) != 0 || fs_unlink(path) != 0)
            die(path);
        samples[i] = now() - start;
    }
    report(samples, count, now() - begin, bytes);
}

static void mail(const char *dir, size_t bytes, size_t millis) {
    char from[4096], to[4096];
    size_t most = millis * 16, i = 0;
    uint64_t *samples = calloc(most, sizeof *samples);
    if (samples == NULL)
        die("memory");
    uint64_t begin = now(), end = begin + millis * 1000000u;
    for (; i < most && now() < end; i++) {
        snprintf(from, sizeof from, "%s/tmp/%d.%zu", dir, (int)getpid(), i);
        snprintf(to, sizeof to, "%s/new/%d.%zu", dir, (int)getpid(), i);
        uint64_t start = now();
        int fd = open_or_die(from, O_WRONLY | O_CREAT | O_EXCL);
        if (fs_write(fd, buffer, bytes) != (ssize_t)bytes || fs_fsync(fd) != 0 ||
            fs_close(fd) != 0 || fs_rename(from, to) != 0)
            die(from);
        samples[i] = now() - start;
    }
    report(samples, i, now() - begin, bytes);
}

enum { FILES = 100 };

static const char *numbered(const char *dir, size_t n) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%d.%zu", dir, (int)getpid(), n % FILES);
    return path;
}

static void put(const char *path, int flags, size_t bytes, int sync) {
    int fd = open_or_die(path, O_WRONLY | O_CREAT | flags);
    for (size_t done = 0; done < bytes; done += 16384) {
        size_t piece = bytes - done < 16384 ? bytes - done : 16384;
        if (fs_write(fd, buffer, piece) != (ssize_t)piece)
            die(path);
    }
    if ((sync && fs_fsync(fd) != 0) || fs_close(fd) != 0)
        die(path);
}

static void get_whole(const char *path, size_t bytes) {
    int fd = open_or_die(path, O_RDONLY);
    for (off_t at = 0;; at += 16384) {
        ssize_t got = fs_pread(fd, buffer, bytes < 16384 ? bytes : 16384, at);
        if (got < 0)
            die(path);
        if (got < 16384)
            break;
    }
    fs_close(fd);
}

/* One operation is one step of a flow; what it takes is not asked of each. */
static void served(const char *dir, size_t bytes, size_t millis, int mail) {
    for (size_t n = 0; n < FILES; n++)
        put(numbered(dir, n), 0, bytes, 0);
    uint64_t begin = now(), end = begin + millis * 1000000u;
    size_t rounds = 0, steps = mail ? 4 : 6;
    while (now() < end) {
        size_t n = next_random();
        if (fs_unlink(numbered(dir, n)) != 0)
            die("unlink");
        put(numbered(dir, n), 0, bytes, mail);
        n = next_random();
        if (mail) {
            get_whole(numbered(dir, n), bytes);
            put(numbered(dir, n), O_APPEND, bytes, 1);
        } else {
            put(numbered(dir, n), O_APPEND, bytes < 16384 ? bytes : 16384, 0);
            get_whole(numbered(dir, next_random()), bytes);
            struct stat st;
            if (stat(numbered(dir, next_random()), &st) != 0)
                die("stat");
        }
        get_whole(numbered(dir, next_random()), bytes);
        rounds++;
    }
    uint64_t took = now() - begin;
    for (size_t n = 0; n < FILES; n++)
        if (fs_unlink(numbered(dir, n)) != 0)
            die("unlink");
    printf("{\"ops\":%zu,\"bytes\":%zu,\"seconds\":%.6f}\n", rounds * steps, bytes, (double)took / 1e9);
}

/* A program that wants the memory's bandwidth. */
static void stream(size_t bytes, size_t millis, int held) {
    uint64_t *words = malloc(bytes), sum = 0;
    if (words == NULL)
        die("memory");
    memset(words, 1, bytes);
    if (held)
        wait_for_all();
    uint64_t begin = now(), end = begin + millis * 1000000u;
    size_t passes = 0;
    for (; now() < end; passes++)
        for (size_t i = 0; i < bytes / 8; i++)
            sum += words[i] ^= sum;
    printf("{\"ops\":%zu,\"bytes\":%zu,\"sum\":%lu,\"seconds\":%.6f}\n", passes, bytes, sum,
           (double)(now() - begin) / 1e9);
}

/* Whose turn it is, in memory of both; who waits looks there without a system call. */
static volatile uint64_t *map_turn(const char *path) {
    int flags = MAP_SHARED, fd = -1;
    if (path == NULL)
        flags |= MAP_ANONYMOUS;
    else if ((fd = open(path, O_RDWR)) < 0)
        die(path);
    volatile uint64_t *turn = mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (turn == MAP_FAILED)
        die("mmap");
    if (fd >= 0)
        close(fd);
    return turn;
}

/* Gives the processor away meanwhile, as far as somebody else wants it; and does not wait for ever. */
static void await_turn(volatile uint64_t *turn, uint64_t which) {
    uint64_t end = now() + 60000000000u;
    while (*turn != which) {
        sched_yield();
        if (now() > end)
            die("the other one");
    }
}

/* The block that goes to and fro, before the first turn. */
static void begin_turns(const char *path, size_t bytes) {
    int fd = open_or_die(path, O_RDWR | O_CREAT);
    memset(buffer, 0, bytes);
    if (fs_pwrite(fd, buffer, bytes, 0) != (ssize_t)bytes || fs_fsync(fd) != 0)
        die("pwrite");
    fs_close(fd);
}

static void take_turns(const char *path, volatile uint64_t *turn, uint64_t me, size_t bytes, size_t count, uint64_t *samples) {
    int fd = open_or_die(path, O_RDWR);
    for (size_t i = 0; i < count; i++) {
        await_turn(turn, 2 * i + me);
        uint64_t start = now(), seen;
        if (fs_pread(fd, buffer, bytes, 0) != (ssize_t)bytes)
            die("pread");
        memcpy(&seen, buffer, sizeof seen);
        if (seen != 2 * i + me) {
            fprintf(stderr, "load: turn %zu of %d sees %lu\n", i, (int)me, seen);
            exit(1);
        }
        seen++;
        memcpy(buffer, &seen, sizeof seen);
        if (fs_pwrite(fd, buffer, bytes, 0) != (ssize_t)bytes)
            die("pwrite");
        samples[i] = now() - start;
        __atomic_store_n(turn, 2 * i + me + 1, __ATOMIC_SEQ_CST);
    }
    fs_close(fd);
}

static void turns(const char *path, size_t bytes, size_t count, uint64_t *samples) {
    volatile uint64_t *turn = map_turn(NULL);
    begin_turns(path, bytes);
    pid_t other = fork();
    if (other < 0)
        die("fork");
    uint64_t me = other == 0, begin = now();
    take_turns(path, turn, me, bytes, count, samples);
    if (me == 1)
        exit(0);
    int status = 1;
    if (waitpid(other, &status, 0) != other || status != 0)
        exit(1);
    report(samples, count, now() - begin, bytes);
}

static void peer(const char *path, const char *shared, uint64_t me, size_t bytes, size_t count, uint64_t *samples) {
    volatile uint64_t *turn = map_turn(shared);
    if (me == 0)
        begin_turns(path, bytes);
    else
        await_turn(turn, 1);
    uint64_t begin = now();
    take_turns(path, turn, me, bytes, count, samples);
    report(samples, count, now() - begin, bytes);
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

enum { SORTERS = 4, SORT_KEY = 10 };

static size_t record_bytes;

static int by_key(const void *a, const void *b) {
    return memcmp(a, b, SORT_KEY);
}

static FILE *part(const char *dir, const char *what, unsigned from, unsigned to, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%u-%u", dir, what, from, to);
    FILE *file = fopen(path, mode);
    if (file == NULL)
        die(path);
    return file;
}

static void durable(FILE *file) {
    if (fflush(file) != 0 || fs_fsync(fileno(file)) != 0 || fclose(file) != 0)
        die("a file of the sort");
}

/* Makes its share of the records, where others would read them, and puts them into a file for each range. */
static void partition(const char *dir, unsigned me, size_t count, unsigned percent) {
    FILE *to[SORTERS];
    char *record = malloc(record_bytes);
    if (record == NULL)
        die("memory");
    size_t noise = record_bytes - record_bytes * percent / 100;
    for (unsigned n = 0; n < SORTERS; n++)
        to[n] = part(dir, "part", me, n, "w");
    uint64_t number = (uint64_t)(me + 1) << 48;
    for (size_t i = 0; i < count; i++) {
        for (size_t at = 0; at < record_bytes; at++)
            record[at] = at < noise || at < SORT_KEY ? (char)mix(++number) : 'c';
        if (fwrite(record, record_bytes, 1, to[(uint8_t)record[0] / (256 / SORTERS)]) != 1)
            die("write");
    }
    for (unsigned n = 0; n < SORTERS; n++)
        durable(to[n]);
}

static void sort_range(const char *dir, unsigned me, size_t count) {
    size_t have = 0, room = count / SORTERS * 2 + SORTERS;
    char *all = malloc(room * record_bytes);
    if (all == NULL)
        die("memory");
    for (unsigned n = 0; n < SORTERS; n++) {
        FILE *from = part(dir, "part", n, me, "r");
        have += fread(all + have * record_bytes, record_bytes, room - have, from);
        if (!feof(from) && fgetc(from) != EOF)
            die("a range");
        fclose(from);
    }
    qsort(all, have, record_bytes, by_key);
    FILE *to = part(dir, "sorted", me, 0, "w");
    if (fwrite(all, record_bytes, have, to) != have)
        die("write");
    durable(to);
}

/* Four processes; `sorts`: those of the second phase. */
static void phase(const char *dir, size_t count, unsigned percent, int sorts) {
    for (unsigned n = 0; n < SORTERS; n++) {
        pid_t child = fork();
        if (child < 0)
            die("fork");
        if (child == 0) {
            if (sorts)
                sort_range(dir, n, count);
            else
                partition(dir, n, count / SORTERS, percent);
            exit(0);
        }
    }
    for (unsigned n = 0; n < SORTERS; n++) {
        int status = 1;
        if (wait(&status) < 0 || status != 0)
            exit(1);
    }
}

static void sort_records(const char *dir, size_t bytes, size_t count, unsigned percent) {
    record_bytes = bytes, count = count / SORTERS * SORTERS;
    phase(dir, count, percent, 0);
    uint64_t begin = now();
    phase(dir, count, percent, 1);
    uint64_t took = now() - begin;
    /* Nothing is missing, and all of it in its order. */
    char last[SORT_KEY] = {0}, *record = malloc(bytes);
    size_t there = 0;
    for (unsigned n = 0; n < SORTERS; n++) {
        FILE *from = part(dir, "sorted", n, 0, "r");
        for (; record != NULL && fread(record, bytes, 1, from) == 1; there++) {
            if (memcmp(record, last, SORT_KEY) < 0)
                die("the order");
            memcpy(last, record, SORT_KEY);
        }
        fclose(from);
    }
    if (there != count)
        die("the number of records");
    printf("{\"ops\":%zu,\"bytes\":%zu,\"seconds\":%.6f}\n", count, bytes, (double)took / 1e9);
}

/* The blocks of one writer of a file that several write. */
static void stride(const char *path, size_t bytes, size_t millis, size_t who, size_t many, size_t size) {
    int fd = open_or_die(path, O_RDWR);
    size_t blocks = size / bytes, ops = 0, passes = 0;
    uint64_t begin = 0;
    if (many == 0 || who >= many || blocks < many)
        die("a stride");
    do {
        for (size_t block = who; block < blocks; block += many) {
            *(uint64_t *)buffer = mix(block + passes);
            if (fs_pwrite(fd, buffer, bytes, (off_t)(block * bytes)) != (ssize_t)bytes)
                die("pwrite");
            ops++;
        }
        if (fs_fsync(fd) != 0)
            die("fsync");
        if (passes++ == 0) {
            begin = now();
            ops = 0;
        }
    } while (now() - begin < millis * 1000000u);
    printf("{\"ops\":%zu,\"bytes\":%zu,\"passes\":%zu,\"seconds\":%.6f}\n", ops, bytes, passes, (double)(now() - begin) / 1e9);
    fs_close(fd);
}

static void fill_record(uint64_t *words, uint64_t number) {
    words[0] = number;
    for (size_t i = 1; i < RECORD / 8; i++)
        words[i] = mix(number * 512 + i);
}

/* How many whole records the file holds: record N (from 1) lies at (N - 1) * RECORD. */
static uint64_t count_records(int fd, uint64_t *bad) {
    uint64_t got[RECORD / 8], want[RECORD / 8], number = 0;
    *bad = 0;
    while (fs_pread(fd, (char *)got, RECORD, (off_t)(number * RECORD)) == RECORD) {
        fill_record(want, number + 1);
        if (memcmp(got, want, RECORD) != 0) {
            *bad = number + 1;
            break;
        }
        number++;
    }
    return number;
}

/* Goes on where the file ends, as a program does that was restarted. Each line says a record that
 * is acknowledged (fsync has returned), and when. */
static void records(const char *path, uint64_t count, uint64_t seconds) {
    uint64_t words[RECORD / 8], bad, end = now() + seconds * 1000000000u;
    int fd = open_or_die(path, O_RDWR | O_CREAT);
    uint64_t number = count_records(fd, &bad);
    printf("start %lu %lu\n", number, now());
    fflush(stdout);
    for (uint64_t i = 0; i < count && now() < end; i++) {
        fill_record(words, ++number);
        if (fs_pwrite(fd, (char *)words, RECORD, (off_t)((number - 1) * RECORD)) != RECORD)
            die("pwrite");
        if (fs_fsync(fd) != 0)
            die("fsync");
        printf("%lu %lu\n", number, now());
        fflush(stdout);
    }
    fs_close(fd);
}

static void verify(const char *path) {
    uint64_t bad;
    int fd = open_or_die(path, O_RDONLY);
    uint64_t number = count_records(fd, &bad);
    printf("{\"records\":%lu,\"bad\":%lu}\n", number, bad);
    fs_close(fd);
}

int main(int argc, char **argv) {
    if (argc < 3 || (strcmp(argv[1], "verify") != 0 && argc < 5)) {
        fprintf(stderr, "usage: load LOAD PATH BYTES COUNT (see load.c)\n");
        return 2;
    }
    const char *load = argv[1], *path = argv[2];
    if (fs_attach() != 0)
        die("attach");
    if (strcmp(load, "verify") == 0) {
        verify(path);
        return 0;
    }
    size_t bytes = strtoul(argv[3], NULL, 10), count = strtoul(argv[4], NULL, 10);
    if (strcmp(load, "records") == 0) {
        records(path, bytes, count);
        return 0;
    }
    if ((strcmp(load, "stream") == 0 || strcmp(load, "held-stream") == 0) && bytes >= 4096 && bytes <= (1u << 30)) {
        stream(bytes, count, load[0] == 'h');
        return 0;
    }
    if (strncmp(load, "sort-", 5) == 0 && strtoul(load + 5, NULL, 10) <= 100 && bytes >= SORT_KEY && bytes <= 4096) {
        sort_records(path, bytes, count, (unsigned)strtoul(load + 5, NULL, 10));
        return 0;
    }
    if (bytes == 0 || bytes > (1u << 24) || bytes % 16 != 0 || count == 0 || count > 100000000) {
        fprintf(stderr, "load: BYTES is 16 to 16777216 in steps of 16, COUNT 1 to 100000000\n");
        return 2;
    }
    uint64_t *samples = calloc(count, sizeof *samples);
    buffer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (samples == NULL || buffer == NULL)
        die("memory");
    for (size_t i = 0; i < bytes; i++)
        buffer[i] = (char)mix(i);
    memset(samples, 1, count * sizeof *samples);
    measure_clock();
    if (strcmp(load, "persist") == 0)
        persist(path, bytes, count, samples);
    else if (strcmp(load, "memcpy") == 0)
        copy_cold(path, bytes, count, samples);
    else if (strcmp(load, "copy") == 0)
        copy_behind(path, bytes, count, samples);
    else if (strcmp(load, "write") == 0)
        write_bursts(path, bytes, count, samples);
    else if (strcmp(load, "append") == 0)
        append_sync(path, bytes, count, samples);
    else if (strcmp(load, "seq") == 0 || strcmp(load, "fill") == 0 || strcmp(load, "held-seq") == 0)
        sequential(path, bytes, count, samples, load[0] == 'h');
    else if (strncmp(load, "mixed-", 6) == 0 && strtoul(load + 6, NULL, 10) <= 100)
        mixed(path, bytes, count, samples, (unsigned)strtoul(load + 6, NULL, 10));
    else if (strcmp(load, "rewrite") == 0)
        rewrite(path, bytes, count, samples);
    else if (strcmp(load, "tmp") == 0)
        temporary(path, bytes, count, samples);
    else if (strcmp(load, "read") == 0)
        random_reads(path, bytes, count, samples);
    else if (strcmp(load, "files") == 0)
        small_files(path, bytes, count, samples);
    else if (strcmp(load, "mail") == 0)
        mail(path, bytes, count);
    else if (strcmp(load, "varmail") == 0 || strcmp(load, "server") == 0)
        served(path, bytes, count, load[0] == 'v');
    else if (strncmp(load, "stride-", 7) == 0 && argc > 6)
        stride(path, bytes, count, strtoul(load + 7, NULL, 10), strtoul(argv[5], NULL, 10), strtoul(argv[6], NULL, 10));
    else if (strcmp(load, "turns") == 0)
        turns(path, bytes, count, samples);
    else if ((strcmp(load, "peer-0") == 0 || strcmp(load, "peer-1") == 0) && argc > 5)
        peer(path, argv[5], load[5] == '1', bytes, count, samples);
    else {
        fprintf(stderr, "load: no load %s\n", load);
        return 2;
    }
    return 0;
}

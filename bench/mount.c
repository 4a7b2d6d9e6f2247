/* The loads of `corbel bench mount`: an ordinary program, run in the same way on each file system.
 *
 *   mount create DIR COUNT      make COUNT empty files in one directory
 *   mount stat DIR COUNT        lstat each of them
 *   mount list DIR COUNT        list them, and lstat each
 *   mount readdir DIR COUNT     list them
 *   mount reopen DIR COUNT      COUNT times open, read 4 KiB, close one of 64 files (cached)
 *   mount unlink DIR COUNT      remove what `create` made
 *   mount fill DIR MIB          sequential writes of 1 MiB and one fsync; makes what the next seven use
 *   mount rewrite DIR MIB       the same over what `fill` has made
 *   mount scan DIR MIB          sequential reads of 1 MiB, caches dropped before
 *   mount read DIR COUNT T      COUNT random reads of 4 KiB by T threads, cached
 *   mount dread DIR COUNT T     the same with O_DIRECT
 *   mount write DIR COUNT T     COUNT random writes of 4 KiB by T threads
 *   mount dwrite DIR COUNT T    the same with O_DIRECT
 *   mount mixed DIR COUNT T     alternately read and write
 *   mount files DIR COUNT       COUNT times make a file, write 4 KiB, fsync, close, rename
 *   mount append DIR COUNT      COUNT times append 4 KiB, fdatasync
 *   mount clean DIR 0           remove what is there, except of `create`
 *
 * Prints {"ops": operations (MiB where sequential), "s": seconds}. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, MIB = 1 << 20, SMALL = 64, THREADS_MAX = 64 };

static const char *dir;
static long count, threads = 1;
static off_t file_blocks;
static int mode, past_cache; /* 0 read, 1 write, 2 mixed */

static void die(const char *what) {
    fprintf(stderr, "mount: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *block(size_t len) {
    void *at;
    if (posix_memalign(&at, BLOCK, len)) die("memory");
    memset(at, 'x', len);
    return at;
}

static char *path(char *at, const char *kind, long n) {
    snprintf(at, 512, "%s/%s%ld", dir, kind, n);
    return at;
}

static void check(int bad, const char *what) {
    if (bad) die(what);
}

static void names(const char *what) {
    char at[512];
    struct stat st;
    for (long i = 0; i < count; i++) {
        path(at, "name", i);
        if (*what == 'c') {
            int fd = open(at, O_CREAT | O_EXCL | O_WRONLY, 0644);
            check(fd < 0 || close(fd), at);
        } else if (*what == 's') {
            check(lstat(at, &st), at);
        } else {
            check(unlink(at), at);
        }
    }
}

static void list(int look) {
    char at[1024];
    struct stat st;
    struct dirent *entry;
    long seen = 0;
    DIR *open = opendir(dir);
    check(!open, dir);
    while ((entry = readdir(open))) {
        if (strncmp(entry->d_name, "name", 4)) continue;
        seen++;
        snprintf(at, sizeof at, "%s/%s", dir, entry->d_name);
        if (look) check(lstat(at, &st), at);
    }
    closedir(open);
    errno = EIO;
    check(seen != count, "names are missing");
}

static double reopen(void) {
    char at[512], *data = block(BLOCK);
    for (int i = 0; i < SMALL; i++) {
        int fd = open(path(at, "small", i), O_CREAT | O_WRONLY | O_TRUNC, 0644);
        check(fd < 0 || write(fd, data, BLOCK) != BLOCK || close(fd), at);
    }
    double start = 0;
    for (long i = -2 * SMALL; i < count; i++) { /* the first rounds fill the caches */
        if (i == 0) start = now();
        int fd = open(path(at, "small", (i + 2 * SMALL) % SMALL), O_RDONLY);
        check(fd < 0 || read(fd, data, BLOCK) != BLOCK || close(fd), at);
    }
    return now() - start;
}

static void sequential(int scan, int how) {
    char at[512], *data = block(MIB);
    int fd = open(path(at, "large", 0), scan ? O_RDONLY : O_CREAT | O_WRONLY | how, 0644);
    check(fd < 0, at);
    for (long i = 0; i < count; i++)
        check((scan ? read(fd, data, MIB) : write(fd, data, MIB)) != MIB, at);
    check((!scan && fsync(fd)) || close(fd), at);
}

static void drop(void) {
    char at[512];
    int fd = open(path(at, "large", 0), O_RDONLY);
    check(fd < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) || close(fd), at);
}

static void *worker(void *argument) {
    uint64_t random = 88172645463325252u + (uint64_t)(intptr_t)argument * 7919;
    char at[512], *data = block(BLOCK);
    int direct = past_cache ? O_DIRECT : 0;
    int fd = open(path(at, "large", 0), (mode ? O_RDWR : O_RDONLY) | direct);
    check(fd < 0, at);
    for (long i = 0; i < count / threads; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        off_t offset = (off_t)(random % (uint64_t)file_blocks) * BLOCK;
        int writes = mode == 1 || (mode == 2 && i % 2);
        ssize_t done = writes ? pwrite(fd, data, BLOCK, offset) : pread(fd, data, BLOCK, offset);
        check(done != BLOCK, at);
    }
    close(fd);
    return 0;
}

static double random_access(void) {
    char at[512], *data = block(MIB);
    struct stat st;
    check(stat(path(at, "large", 0), &st), at);
    file_blocks = st.st_size / BLOCK;
    int fd = open(at, O_RDONLY);
    while (read(fd, data, MIB) > 0) continue; /* into the cache */
    close(fd);
    pthread_t all[THREADS_MAX];
    double start = now();
    for (long i = 0; i < threads; i++)
        check(pthread_create(&all[i], 0, worker, (void *)(intptr_t)i), "thread");
    for (long i = 0; i < threads; i++) pthread_join(all[i], 0);
    return now() - start;
}

static void durable(int files) {
    char at[512], to[512], *data = block(BLOCK);
    int fd = -1;
    for (long i = 0; i < count; i++) {
        if (files || fd < 0) fd = open(path(at, files ? "new" : "log", i), O_CREAT | O_WRONLY | O_APPEND, 0644);
        check(fd < 0 || write(fd, data, BLOCK) != BLOCK, at);
        check(files ? fsync(fd) : fdatasync(fd), at);
        if (files) check(close(fd) || rename(at, path(to, "kept", i % SMALL)), at);
    }
}

static void clean(void) {
    char at[1024];
    struct dirent *entry;
    DIR *open = opendir(dir);
    check(!open, dir);
    while ((entry = readdir(open))) {
        snprintf(at, sizeof at, "%s/%s", dir, entry->d_name);
        if (*entry->d_name != '.' && strncmp(entry->d_name, "name", 4)) unlink(at);
    }
    closedir(open);
}

int main(int argc, char **argv) {
    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: mount LOAD DIR COUNT [THREADS]\n");
        return 2;
    }
    const char *load = argv[1];
    dir = argv[2], count = atol(argv[3]);
    if (argc == 5) threads = atol(argv[4]);
    if (threads < 1 || threads > THREADS_MAX) return 2;
    if (!strcmp(load, "scan")) drop();
    double start = now(), seconds = 0;
    if (!strcmp(load, "create") || !strcmp(load, "stat") || !strcmp(load, "unlink")) names(load);
    else if (!strcmp(load, "list") || !strcmp(load, "readdir")) list(*load == 'l');
    else if (!strcmp(load, "reopen")) seconds = reopen();
    else if (!strcmp(load, "fill") || !strcmp(load, "scan")) sequential(*load == 's', O_TRUNC);
    else if (!strcmp(load, "rewrite")) sequential(0, 0);
    else if (!strcmp(load, "read")) mode = 0, seconds = random_access();
    else if (!strcmp(load, "write")) mode = 1, seconds = random_access();
    else if (!strcmp(load, "mixed")) mode = 2, seconds = random_access();
    else if (!strcmp(load, "dread")) past_cache = 1, seconds = random_access();
    else if (!strcmp(load, "dwrite")) past_cache = mode = 1, seconds = random_access();
    else if (!strcmp(load, "files") || !strcmp(load, "append")) durable(*load == 'f');
    else if (!strcmp(load, "clean")) clean();
    else return 2;
    if (seconds == 0) seconds = now() - start;
    printf("{\"ops\": %ld, \"s\": %.9f}\n", count, seconds);
    return 0;
}

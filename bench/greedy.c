/* What a program may ask for that costs the service far more than it costs the program: `corbel bench doors` runs each, and
 * looks how long the node heard nobody else.
 *
 *   greedy modes   DIR MIB COUNT      a file of so many MiB is taken from everybody and given back, COUNT times
 *   greedy extents DIR EXTENTS 1      a file of so many pieces is written, changes its class, is cut, written and removed
 *   greedy deep    DIR DEPTH COUNT    renames of a directory far below, each of which looks at all above it
 *   greedy names   DIR COUNT 1        files made and removed as fast as it goes
 *
 * Prints {"seconds": how long it took}; what is refused ends it with an error. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what) {
    fprintf(stderr, "greedy: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int make(const char *name) {
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0644);
    if (fd < 0)
        die(name);
    return fd;
}

static void modes(long mib, long count) {
    static char block[1 << 20];
    memset(block, 7, sizeof block);
    int fd = make("modes");
    for (long i = 0; i < mib; i++)
        if (write(fd, block, sizeof block) != (ssize_t)sizeof block)
            die("write");
    for (long i = 0; i < count; i++)
        if (fchmod(fd, i % 2 == 0 ? 0600 : 0644) != 0)
            die("fchmod");
    if (fsync(fd) != 0 || close(fd) != 0 || unlink("modes") != 0)
        die("modes");
}

static void scatter(int fd, long extents) {
    for (long i = 0; i < extents; i++)
        if (pwrite(fd, "x", 1, (off_t)i * 8192) != 1)
            die("pwrite");
    if (fsync(fd) != 0)
        die("fsync");
}

static void extents(long count) {
    int fd = make("extents");
    scatter(fd, count);
    if (fchmod(fd, 0600) != 0 || fchmod(fd, 0644) != 0 || fsync(fd) != 0)
        die("fchmod");
    /* What would move too much is refused. */
    if ((fallocate(fd, FALLOC_FL_INSERT_RANGE, 0, 4096) != 0 && errno != EOPNOTSUPP) ||
        (fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096) != 0 && errno != EOPNOTSUPP))
        die("fallocate");
    if (ftruncate(fd, 1) != 0 || fsync(fd) != 0)
        die("ftruncate");
    scatter(fd, count);
    if (unlink("extents") != 0 || close(fd) != 0)
        die("unlink");
}

static void deep(long depth, long count) {
    if (mkdir("deep", 0755) != 0 || chdir("deep") != 0)
        die("deep");
    for (long i = 0; i < depth; i++)
        if (mkdir("d", 0755) != 0 || chdir("d") != 0)
            die("d");
    if (mkdir("x", 0755) != 0 || mkdir("y", 0755) != 0)
        die("x");
    for (long i = 0; i < count; i++)
        if ((i % 2 == 0 ? rename("x", "y/x") : rename("y/x", "x")) != 0)
            die("rename");
    int fd = open(".", O_RDONLY | O_DIRECTORY);
    if (fd < 0 || fsync(fd) != 0 || close(fd) != 0)
        die("fsync");
}

static void names(long count) {
    char name[32];
    for (long i = 0; i < 2 * count; i++) {
        snprintf(name, sizeof name, "n%ld", i % count);
        if (i >= count ? unlink(name) != 0 : close(make(name)) != 0)
            die(name);
    }
    int fd = open(".", O_RDONLY | O_DIRECTORY);
    if (fd < 0 || fsync(fd) != 0 || close(fd) != 0)
        die("fsync");
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: greedy LOAD DIR SIZE COUNT (see greedy.c)\n");
        return 2;
    }
    long size = strtol(argv[3], NULL, 10), count = strtol(argv[4], NULL, 10);
    if (size <= 0 || count <= 0 || chdir(argv[2]) != 0)
        die(argv[2]);
    double begin = now();
    if (strcmp(argv[1], "modes") == 0)
        modes(size, count);
    else if (strcmp(argv[1], "extents") == 0)
        extents(size);
    else if (strcmp(argv[1], "deep") == 0)
        deep(size, count);
    else if (strcmp(argv[1], "names") == 0)
        names(size);
    else {
        fprintf(stderr, "greedy: no load %s\n", argv[1]);
        return 2;
    }
    printf("{\"seconds\":%.3f}\n", now() - begin);
    return 0;
}

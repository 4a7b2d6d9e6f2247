// System calls that a program makes by itself, as liburing and some languages do: in its own text, and in a library
// that it opens later. With -DLIBRARY this is that library; -DFAR leaves more room between the number and the call.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static inline __attribute__((always_inline)) long own(long nr, long a, long b, long c, long d) {
    register long r10 __asm__("r10") = d;
    long ret;
    __asm__ volatile("syscall" : "=a"(ret) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return ret;
}

#define CALL(name, ...) printf("%s " name " %ld\n", who, (long)(__VA_ARGS__))

__attribute__((noinline)) long any(long nr, long a, long b, long c, long d) { return own(nr, a, b, c, d); }

__attribute__((noinline)) int pick(int how) {
    // A jump into the middle of what could be moved; a constant that looks like a call.
    static const unsigned long long looks = 0x050f00000001b8ULL;
    volatile long fill = looks >> 60;
    switch (how) {
    case 0: return own(SYS_getppid, 0, 0, 0, 0) + fill;
    case 1: return own(SYS_getuid, 0, 0, 0, 0) + fill;
    case 2: return own(SYS_getgid, 0, 0, 0, 0) + fill;
    case 3: return own(SYS_close, -1, 0, 0, 0) + fill;
    case 4: return own(SYS_lseek, -1, 0, 0, 0) + fill;
    default: return -1;
    }
}

int all(const char *who, const char *dir) {
    char path[4096], other[4096], text[64] = "";
    struct stat st = {0};
    snprintf(path, sizeof path, "%s/%s", dir, who);
    snprintf(other, sizeof other, "%s/%s.moved", dir, who);
    long fd = own(SYS_openat, AT_FDCWD, (long)path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    printf("%s open %d\n", who, fd >= 0);
    CALL("write", own(SYS_write, fd, (long)"one ", 4, 0));
    CALL("libc write", write(fd, "two ", 4));
    CALL("any write", any(SYS_write, fd, (long)"three", 5, 0));
    CALL("lseek", own(SYS_lseek, fd, 0, SEEK_CUR, 0));
    CALL("pread", own(SYS_pread64, fd, (long)text, 60, 0));
    printf("%s [%s]\n", who, text);
    CALL("fstat", own(SYS_fstat, fd, (long)&st, 0, 0));
    printf("%s size %ld\n", who, (long)st.st_size);
    CALL("bad address", own(SYS_write, fd, 8, 6, 0));
    CALL("dup", own(SYS_dup2, fd, 200, 0, 0));
    CALL("write", own(SYS_write, 200, (long)"!", 1, 0));
    CALL("libc close", close(200));
    CALL("rename", own(SYS_rename, (long)path, (long)other, 0, 0));
    CALL("access", access(other, F_OK));
    CALL("mkdir", own(SYS_mkdir, (long)path, 0755, 0, 0));
    fflush(stdout);
    long pid = own(SYS_fork, 0, 0, 0, 0);
    if (pid == 0) {
        own(SYS_write, fd, (long)" child", 6, 0);
        own(SYS_exit_group, 3, 0, 0, 0);
    }
    int status = 0;
    own(SYS_wait4, pid, (long)&status, 0, 0);
    CALL("child", WEXITSTATUS(status));
    CALL("size", lseek(fd, 0, SEEK_END));
    CALL("unlink", own(SYS_unlink, (long)other, 0, 0, 0));
    CALL("nameless write", own(SYS_write, fd, (long)"more", 4, 0));
    CALL("close", own(SYS_close, fd, 0, 0, 0));
    CALL("close again", own(SYS_close, fd, 0, 0, 0));
    CALL("errors", pick(3) + pick(4));
    printf("%s who %d\n", who, pick(0) == getppid() && pick(1) == getuid() && pick(2) == getgid());
    return 0;
}

#ifndef LIBRARY
int main(int argc, char **argv) {
    const char *dir = argv[argc - 1];
    all("program", dir);
    if (argc < 3) return 0;
    // Where it was before, something of another size lay meanwhile.
    for (int i = 0; i < 3; i++) {
        char who[32];
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) return printf("%s\n", dlerror()), 1;
        int (*theirs)(const char *, const char *) = dlsym(library, "all");
        snprintf(who, sizeof who, "library%d", i);
        theirs(who, dir);
        printf("closed %d\n", dlclose(library));
        void *math = dlopen("libm.so.6", RTLD_NOW);
        if (math) dlclose(math);
    }
    return 0;
}
#endif

// System calls made from a page of generated code: in threads, in signal handlers, in children; with every
// signal blocked; and SIGSYS as the program sees it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

// Seen in the text of the program, and so without the net as well.
static long inline_raw(long nr, long a, long b, long c) {
    long ret;
    __asm__ volatile("syscall" : "=a"(ret) : "a"(nr), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return ret;
}

// mov rax, rdi; mov rdi, rsi; mov rsi, rdx; mov rdx, rcx; mov r10, r8; mov r8, r9; mov r9, [rsp + 8]; syscall; ret
static const unsigned char CODE[] = {0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, 0x48, 0x89, 0xca, 0x4d,
                                     0x89, 0xc2, 0x4d, 0x89, 0xc8, 0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05, 0xc3};
static long (*raw)(long nr, long a, long b, long c, long d, long e, long f);

static void generate(void) {
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, CODE, sizeof CODE);
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
    raw = page;
}

static const char *dir;

static const char *path(const char *name) {
    static __thread char text[4][4096];
    static __thread int next;
    char *to = text[next++ % 4];
    snprintf(to, 4096, "%s/%s", dir, name);
    return to;
}

static void show(const char *name) {
    char text[256] = "";
    int fd = open(path(name), O_RDONLY);
    long n = read(fd, text, sizeof text - 1);
    close(fd);
    printf("%s: %ld [%s]\n", name, n, text);
}

static void calls(void) {
    long fd = raw(SYS_openat, AT_FDCWD, (long)path("inline"), O_RDWR | O_CREAT, 0644, 0, 0);
    printf("open %d\n", fd >= 0);
    printf("write %ld\n", raw(SYS_write, fd, (long)"inline", 6, 0, 0, 0));
    // Both ways share one offset.
    printf("libc write %zd\n", write(fd, " libc", 5));
    printf("write %ld\n", raw(SYS_write, fd, (long)" again", 6, 0, 0, 0));
    struct stat st;
    printf("fstat %ld", raw(SYS_fstat, fd, (long)&st, 0, 0, 0, 0));
    printf(" size %ld\n", (long)st.st_size);
    printf("efault %ld\n", raw(SYS_write, fd, 8, 6, 0, 0, 0));
    printf("close %ld\n", raw(SYS_close, fd, 0, 0, 0, 0, 0));
    printf("close again %ld\n", raw(SYS_close, fd, 0, 0, 0, 0, 0));
    printf("enoent %ld\n", raw(SYS_open, (long)path("nothing"), O_RDONLY, 0, 0, 0, 0));
    printf("getpid %d\n", raw(SYS_getpid, 0, 0, 0, 0, 0, 0) == getpid());
    show("inline");
}

static void more_calls(void) {
    long fd = raw(SYS_openat, AT_FDCWD, (long)path("generated"), O_RDWR | O_CREAT, 0600, 0, 0);
    printf("write %ld\n", raw(SYS_pwrite64, fd, (long)"generated", 9, 3, 0, 0));
    // Both kinds on one descriptor.
    printf("seek %ld\n", inline_raw(SYS_lseek, fd, 12, SEEK_SET));
    printf("write %ld\n", raw(SYS_write, fd, (long)" and", 4, 0, 0, 0));
    printf("write %ld\n", inline_raw(SYS_write, fd, (long)" inline", 7));
    printf("close %ld\n", raw(SYS_close, fd, 0, 0, 0, 0, 0));
    printf("size %d\n", access(path("generated"), F_OK) == 0);
    printf("mkdir %ld\n", raw(SYS_mkdir, (long)path("sub"), 0755, 0, 0, 0, 0));
    printf("rename %ld\n", raw(SYS_rename, (long)path("generated"), (long)path("sub/g"), 0, 0, 0, 0));
    show("sub/g");
}

static void *thread(void *arg) {
    char name[32];
    snprintf(name, sizeof name, "thread%ld", (long)arg);
    for (int i = 0; i < 200; i++) {
        long fd = raw(SYS_open, (long)path(name), O_WRONLY | O_CREAT | O_APPEND, 0644, 0, 0, 0);
        raw(SYS_write, fd, (long)"x", 1, 0, 0, 0);
        raw(SYS_close, fd, 0, 0, 0, 0, 0);
        raw(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    }
    return NULL;
}

static void threads(void) {
    pthread_t id[4];
    for (long i = 0; i < 4; i++) pthread_create(&id[i], NULL, thread, (void *)i);
    for (int i = 0; i < 4; i++) pthread_join(id[i], NULL);
    for (int i = 0; i < 4; i++) {
        char name[32];
        struct stat st = {0};
        snprintf(name, sizeof name, "thread%d", i);
        stat(path(name), &st);
        printf("%s %ld\n", name, (long)st.st_size);
    }
}

static volatile int alarms;

static void on_alarm(int signal) {
    long fd = raw(SYS_open, (long)path("alarm"), O_WRONLY | O_CREAT | O_APPEND, 0644, 0, 0, 0);
    raw(SYS_write, fd, (long)"a", 1, 0, 0, 0);
    raw(SYS_close, fd, 0, 0, 0, 0, 0);
    alarms++;
}

static void handlers(void) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigfillset(&action.sa_mask);
    sigaction(SIGALRM, &action, NULL);
    struct timeval every[2] = {{0, 700}, {0, 700}};
    setitimer(ITIMER_REAL, (void *)every, NULL);
    long fd = raw(SYS_open, (long)path("work"), O_RDWR | O_CREAT, 0644, 0, 0, 0);
    long good = 1, n = 0;
    for (; alarms < 100 && n < 5000000; n++) {
        good &= raw(SYS_pwrite64, fd, (long)&n, 8, (n % 100) * 8, 0, 0) == 8;
        good &= raw(SYS_getppid, 0, 0, 0, 0, 0, 0) == getppid();
        if (n % 64 == 0) usleep(50);
    }
    memset(every, 0, sizeof every);
    setitimer(ITIMER_REAL, (void *)every, NULL);
    struct stat st;
    stat(path("alarm"), &st);
    printf("handlers: good %ld, all there %d\n", good, st.st_size == alarms && alarms >= 100);
}

static void children(void) {
    fflush(stdout);
    long fd = raw(SYS_open, (long)path("child"), O_RDWR | O_CREAT, 0644, 0, 0, 0);
    raw(SYS_write, fd, (long)"parent ", 7, 0, 0, 0);
    long pid = raw(SYS_fork, 0, 0, 0, 0, 0, 0);
    if (pid == 0) {
        raw(SYS_write, fd, (long)"child ", 6, 0, 0, 0);
        raw(SYS_exit_group, 7, 0, 0, 0, 0, 0);
    }
    int status = 0;
    raw(SYS_wait4, pid, (long)&status, 0, 0, 0, 0);
    printf("fork %d\n", WEXITSTATUS(status));
    raw(SYS_write, fd, (long)"parent", 6, 0, 0, 0);
    show("child");
    char command[4200];
    snprintf(command, sizeof command, "echo shell >>%s; cat %s", path("child"), path("child"));
    fflush(stdout);
    printf("system %d\n", system(command));
    FILE *pipe = popen(command, "r");
    char line[256] = "";
    fgets(line, sizeof line, pipe);
    printf("popen %s%d\n", line, pclose(pipe));
}

static volatile int told;

static void on_sys(int signal) { told++; }

static void masks(void) {
    sigset_t all, old;
    sigfillset(&all);
    printf("block %d\n", sigprocmask(SIG_SETMASK, &all, &old));
    long fd = raw(SYS_open, (long)path("masked"), O_WRONLY | O_CREAT, 0644, 0, 0, 0);
    printf("masked write %ld\n", raw(SYS_write, fd, (long)"masked", 6, 0, 0, 0));
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&old, 0, 8, 0, 0);
    // The program's own SIGSYS.
    struct sigaction mine = {.sa_handler = on_sys}, seen = {0};
    sigaction(SIGSYS, NULL, &seen);
    printf("default %d\n", seen.sa_handler == SIG_DFL);
    sigaction(SIGSYS, &mine, NULL);
    sigaction(SIGSYS, NULL, &seen);
    printf("mine %d\n", seen.sa_handler == on_sys);
    kill(getpid(), SIGSYS);
    printf("told %d\n", told);
    printf("after %ld\n", raw(SYS_write, fd, (long)"!", 1, 0, 0, 0));
    show("masked");
}

int main(int argc, char **argv) {
    dir = argv[argc - 1];
    generate();
    calls();
    more_calls();
    threads();
    handlers();
    children();
    masks();
    return 0;
}

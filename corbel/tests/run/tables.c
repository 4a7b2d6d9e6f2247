// Tables of descriptors and working directories that are not those of the whole process and nobody else's: clone with
// CLONE_FILES alone or CLONE_VM alone, unshare in a thread. Directories that are removed while they are open, and who made
// a file. argv: a static program, a directory on the file system to be looked at.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef F_CREATED_QUERY
#define F_CREATED_QUERY 1028
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2
#define CLOSE_RANGE_CLOEXEC 4
#endif

static void say(const char *what, long ret) {
    printf("%s: %ld %s\n", what, ret, ret < 0 ? strerror(errno) : "");
}

static int make(const char *name, const char *text) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    write(fd, text, strlen(text));
    lseek(fd, 0, SEEK_SET);
    return fd;
}

static void show(const char *what, int fd) {
    char b[64] = {0};
    long n = read(fd, b, 5);
    printf("%s: %ld %s, %s, flags %d, at %ld\n", what, n, n < 0 ? strerror(errno) : "", b, fcntl(fd, F_GETFD), (long)lseek(fd, 0, SEEK_CUR));
}

// What a child that shares the table does to it.
static void in_common(int what, int fd) {
    int other;
    switch (what) {
    case 0: close(fd); break;
    case 1: syscall(SYS_close_range, 3, ~0U, 0); break;
    case 2: syscall(SYS_close_range, 3, ~0U, CLOSE_RANGE_CLOEXEC); break;
    case 3: other = make("other", "other file"); dup2(other, fd); close(other); break;
    case 4: close(fd); make("new", "new file"); break;
    case 5: show("child", fd); break;
    case 6: fcntl(fd, F_SETFD, FD_CLOEXEC); break;
    case 7: syscall(SYS_close_range, 3, ~0U, CLOSE_RANGE_UNSHARE); show("child", fd); break;
    }
}

static char stack[1 << 16] __attribute__((aligned(16)));
static int given;

static int alone(void *what) {
    in_common((int)(long)what, given);
    syscall(SYS_exit, 0);
    return 0;
}

static void *thread(void *what) {
    if ((long)what == 100) {
        say("unshare", syscall(SYS_unshare, CLONE_FS));
        say("chdir", chdir("below"));
        umask(077);
        close(make("mine", "mine"));
    } else if ((long)what == 101) {
        syscall(SYS_close_range, 3, ~0U, CLOSE_RANGE_UNSHARE);
        show("thread", given);
    } else {
        say("unshare", syscall(SYS_unshare, CLONE_FILES));
        in_common((int)(long)what, given);
        show("thread", given);
    }
    return NULL;
}

static void in_thread(long what) {
    pthread_t t;
    pthread_create(&t, NULL, thread, (void *)what);
    pthread_join(t, NULL);
}

static void mode(const char *name) {
    struct stat st;
    int ret = stat(name, &st);
    printf("%s: %d %o\n", name, ret, ret ? 0 : st.st_mode);
}

static void gone(char *program) {
    char b[1024] = {0};
    mkdir("gone", 0755);
    int fd = open("gone", O_RDONLY | O_DIRECTORY), file = make("file", "01234\n6789");
    say("rmdir", rmdir("gone"));
    say("names", syscall(SYS_getdents64, fd, b, sizeof b));
    say("make", openat(fd, "x", O_CREAT | O_WRONLY, 0600));
    if (!fork()) {
        dup2(file, 0);
        execl(program, program, NULL);
        say("exec", -1);
        _exit(1);
    }
    wait(NULL);
    if (!fork()) {
        char params[120] = {0};
        int ring = syscall(SYS_io_uring_setup, 4, params);
        say("ring", ring < 0 && errno != ENOSYS && errno != EPERM ? -1 : 0);
        show("file", file);
        _exit(0);
    }
    wait(NULL);
    show("file", file);
    close(fd), close(file);
}

static void created(void) {
    int fd = make("made", "");
    if (fcntl(0, F_CREATED_QUERY, 0) < 0) return;
    for (int i = 0; i < 2; i++) {
        int other = dup(fd);
        say("made", fcntl(fd, F_CREATED_QUERY, 0));
        say("dup", fcntl(other, F_CREATED_QUERY, 0));
        say("flags", fcntl(fd, F_GETFL) & O_CREAT);
        close(other), close(fd);
        fd = open("made", O_RDWR | O_CREAT, 0644);
    }
    close(fd);
    fd = open("made", O_RDONLY);
    say("found", fcntl(fd, F_CREATED_QUERY, 0));
    close(fd);
    fd = open("exclusive", O_RDONLY | O_CREAT | O_EXCL, 0400);
    say("exclusive", fcntl(fd, F_CREATED_QUERY, 0));
    close(fd);
    fd = open(".", O_RDONLY);
    say("directory", fcntl(fd, F_CREATED_QUERY, 0));
    close(fd);
}

static void mounts(void) {
    struct statx of[3];
    memset(of, 0, sizeof of);
    int fd = make("file", "");
    for (int i = 0; i < 3; i++) {
        unsigned mask = i < 2 ? STATX_BASIC_STATS | STATX_MNT_ID : STATX_BASIC_STATS;
        say("statx", i == 1 ? statx(fd, "", AT_EMPTY_PATH, mask, &of[i]) : statx(AT_FDCWD, ".", 0, mask, &of[i]));
        printf("root %d of %d\n", !!(of[i].stx_attributes & STATX_ATTR_MOUNT_ROOT), !!(of[i].stx_attributes_mask & STATX_ATTR_MOUNT_ROOT));
    }
    printf("mount %d %d, one %d\n", !!(of[0].stx_mask & STATX_MNT_ID), !!(of[1].stx_mask & STATX_MNT_ID), of[0].stx_mnt_id == of[1].stx_mnt_id && of[0].stx_mnt_id);
    close(fd);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    if (chdir(argv[2])) return 1;
    // Each in a process of its own, which has done nothing of the kind before.
    for (int way = 0; way < 3; way++) {
        for (int what = 0; what < 8; what++) {
            if (fork()) {
                wait(NULL);
                continue;
            }
            int fd = given = make("file", "0123456789"), second = dup(fd);
            show("before", fd);
            printf("way %d, %d\n", way, what);
            if (way == 0) {
                int child = syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
                if (!child) in_common(what, fd), _exit(0);
                waitpid(child, NULL, 0);
            } else if (way == 1) {
                int child = clone(alone, stack + sizeof stack, CLONE_VM | SIGCHLD, (void *)(long)what);
                waitpid(child, NULL, __WALL);
            } else {
                in_thread(what);
            }
            show("after", fd);
            show("dup", second);
            int third = make("third", "3333");
            show("third", third);
            _exit(0);
        }
    }
    if (!fork()) {
        given = make("file", "0123456789");
        in_thread(101);
        show("after", given);
        _exit(0);
    }
    wait(NULL);
    mkdir("below", 0755);
    if (!fork()) {
        umask(0);
        close(make("before", ""));
        in_thread(100);
        close(make("after", ""));
        mode("before"), mode("after"), mode("mine"), mode("below/mine"), mode("below/after");
        _exit(0);
    }
    wait(NULL);
    gone(argv[1]);
    created();
    mounts();
    return 0;
}

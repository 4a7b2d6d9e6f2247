// Descriptors that calls hand to the kernel, other than the one they work on: in arguments, in memory, in commands of
// ioctl. argv[1]: a directory on the file system to be looked at. What needs rights or a kernel that are not there
// says the same on every file system.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/kcmp.h>
#include <linux/landlock.h>
#include <linux/loop.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/filter.h>
#include <sys/epoll.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef LOOP_CONFIGURE
#define LOOP_CONFIGURE 0x4C0A
struct loop_config { __u32 fd, block_size; struct loop_info64 info; __u64 reserved[8]; };
#endif
#define ADDFD_IOCTL 0x40182103
struct addfd { __u64 id; __u32 flags, srcfd, newfd, newfd_flags; };

static const char *dir;
static int beside; // A file on another file system.

static const char *path(const char *name) {
    static char text[4][4096];
    static int next;
    char *to = text[next++ % 4];
    snprintf(to, 4096, "%s/%s", dir, name);
    return to;
}

static long say(const char *what, long ret) {
    printf("%s %ld %s\n", what, ret, ret < 0 ? strerror(errno) : "");
    fflush(stdout);
    return ret;
}

static int file(const char *name, const char *text) {
    int fd = open(path(name), O_RDWR | O_CREAT | O_TRUNC, 0644);
    write(fd, text, strlen(text));
    return fd;
}

static void show(const char *what, int fd) {
    char text[64] = "";
    struct stat st;
    long n = pread(fd, text, 63, 0);
    printf("%s %ld [%s] ", what, n, text);
    printf("at %ld\n", (long)lseek(fd, 0, SEEK_CUR));
}

// A loop device, if there is one to be had.
static void loops(void) {
    int control = open("/dev/loop-control", O_RDWR);
    for (int how = 0; how < 2; how++) {
        char device[64], text[8] = "";
        int image = open(path("image"), O_RDWR | O_CREAT, 0644), other = open(path("other"), O_RDWR | O_CREAT, 0644);
        ftruncate(image, 1 << 20), ftruncate(other, 1 << 20);
        pwrite(image, "IMAGE", 5, 0), pwrite(other, "OTHER", 5, 0);
        int free = control < 0 ? -1 : ioctl(control, LOOP_CTL_GET_FREE), loop;
        snprintf(device, sizeof device, "/dev/loop%d", free);
        if (free < 0 || (loop = open(device, O_RDWR)) < 0) {
            printf("no loop devices\n");
            return;
        }
        struct loop_config config = {.fd = image};
        if (how)
            say("configure", ioctl(loop, LOOP_CONFIGURE, &config));
        else
            say("set fd", ioctl(loop, LOOP_SET_FD, image));
        say("read", pread(loop, text, 5, 0));
        printf("%s\n", text);
        say("write", pwrite(loop, "loop!", 5, 0));
        say("fsync", fsync(loop));
        say("clear", ioctl(loop, LOOP_CLR_FD, 0));
        say("bad", ioctl(loop, LOOP_SET_FD, 999));
        show("image", image);
        close(loop), close(image), close(other);
    }
}

static void clones(void) {
    int from = file("clone", "source");
    struct file_clone_range range = {.src_fd = from};
    say("clone to another", ioctl(beside, FICLONE, from));
    say("range to another", ioctl(beside, FICLONERANGE, &range));
    say("clone bad", ioctl(beside, FICLONE, 999));
    struct { struct file_dedupe_range range; struct file_dedupe_range_info info[2]; } same = {
        .range = {.src_length = 6, .dest_count = 2}, .info = {{.dest_fd = from}, {.dest_fd = 999}}};
    ioctl(beside, FIDEDUPERANGE, &same);
    show("clone", from);
    close(from);
}

static void compares(void) {
    int a = file("a", "a"), b = file("b", "b"), c = dup(a), d = open(path("."), O_RDONLY | O_DIRECTORY), me = getpid();
    printf("a a %ld", syscall(SYS_kcmp, me, me, KCMP_FILE, a, a));
    printf(" a b %d", syscall(SYS_kcmp, me, me, KCMP_FILE, a, b) > 0);
    printf(" a c %ld", syscall(SYS_kcmp, me, me, KCMP_FILE, a, c));
    printf(" b c %d", syscall(SYS_kcmp, me, me, KCMP_FILE, b, c) > 0);
    printf(" a d %d", syscall(SYS_kcmp, me, me, KCMP_FILE, a, d) > 0);
    printf(" d d %ld\n", syscall(SYS_kcmp, me, me, KCMP_FILE, d, d));
    int e = open(path("a"), O_RDWR);
    printf("query a c %d", fcntl(a, 1027, c));
    printf(" a e %d\n", fcntl(a, 1027, e));
    close(a), close(b), close(c), close(d), close(e);
}

static void watches(void) {
    int fan = syscall(SYS_fanotify_init, FAN_CLASS_NOTIF | FAN_NONBLOCK, O_RDONLY), fd = file("watched", "w");
    int d = open(path("."), O_RDONLY | O_DIRECTORY);
    if (fan < 0) {
        printf("no fanotify\n");
    } else {
        say("mark file", syscall(SYS_fanotify_mark, fan, FAN_MARK_ADD, (__u64)FAN_MODIFY, fd, NULL));
        say("mark directory", syscall(SYS_fanotify_mark, fan, FAN_MARK_ADD, (__u64)FAN_MODIFY, d, NULL));
        say("mark name", syscall(SYS_fanotify_mark, fan, FAN_MARK_ADD, (__u64)FAN_MODIFY, d, "watched"));
        say("mark only", syscall(SYS_fanotify_mark, fan, FAN_MARK_ADD | FAN_MARK_ONLYDIR, (__u64)FAN_MODIFY, fd, NULL));
        say("mark with", syscall(SYS_fanotify_mark, fd, FAN_MARK_ADD, (__u64)FAN_MODIFY, d, NULL));
        close(fan);
    }
    struct epoll_event event = {EPOLLIN};
    int e = epoll_create1(0), other = file("other", "o");
    say("epoll file", epoll_ctl(e, EPOLL_CTL_ADD, other, &event));
    say("epoll on file", epoll_ctl(other, EPOLL_CTL_ADD, e, &event));
    say("epoll wait", epoll_wait(other, &event, 1, 0));
    say("inotify on file", inotify_add_watch(other, dir, IN_OPEN));
    close(e), close(other), close(fd), close(d);
}

static int rules(unsigned long long access, int fd) {
    struct landlock_ruleset_attr all = {.handled_access_fs = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE};
    int set = syscall(SYS_landlock_create_ruleset, &all, sizeof all, 0);
    struct landlock_path_beneath_attr rule = {.allowed_access = access, .parent_fd = fd};
    say("rule", syscall(SYS_landlock_add_rule, set, LANDLOCK_RULE_PATH_BENEATH, &rule, 0));
    return set;
}

// A program that shuts itself in keeps what is open, and gets only what its rules say: in programs that it starts, too.
static void landlock(void) {
    if (syscall(SYS_landlock_create_ruleset, NULL, 0, 1) < 1) {
        printf("no landlock\n");
        return;
    }
    int open_before = file("before", "before"), allowed = file("allowed", "allowed"), denied = file("denied", "denied");
    struct landlock_path_beneath_attr rule = {LANDLOCK_ACCESS_FS_READ_FILE, allowed};
    say("rules that are a file", syscall(SYS_landlock_add_rule, denied, LANDLOCK_RULE_PATH_BENEATH, &rule, 0));
    say("restricted by a file", syscall(SYS_landlock_restrict_self, denied, 0));
    if (!fork()) {
        int set = rules(LANDLOCK_ACCESS_FS_READ_FILE, allowed);
        const char *places[] = {"/bin", "/usr", "/lib", "/lib64", "/etc", "/dev/null"};
        for (int i = 0; i < 6; i++) {
            struct landlock_path_beneath_attr more = {LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE};
            if ((more.parent_fd = open(places[i], O_PATH)) >= 0)
                syscall(SYS_landlock_add_rule, set, LANDLOCK_RULE_PATH_BENEATH, &more, 0);
        }
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        say("restrict", syscall(SYS_landlock_restrict_self, set, 0));
        show("before", open_before);
        say("write", write(open_before, "!", 1));
        say("open allowed", open(path("allowed"), O_RDONLY));
        say("open to write", open(path("allowed"), O_WRONLY));
        say("open denied", open(path("denied"), O_RDONLY));
        say("stat denied", access(path("denied"), F_OK));
        say("make", open(path("landlock"), O_RDWR | O_CREAT, 0644) >= 0);
        fflush(stdout);
        char command[9000];
        snprintf(command, sizeof command, "cat %s; echo; cat %s 2>/dev/null || echo denied; echo more >&%d", path("allowed"),
                 path("denied"), open_before);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(9);
    }
    int status;
    wait(&status);
    printf("status %d\n", WEXITSTATUS(status));
    show("before", open_before);
    close(open_before), close(allowed), close(denied);
}

// Somebody who decides for another process hands it a file.
static void supervised(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, code};
    int ends[2], fd = file("given", "given to another");
    socketpair(AF_UNIX, SOCK_DGRAM, 0, ends);
    lseek(fd, 6, SEEK_SET);
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
        write(ends[1], &listener, sizeof listener);
        if (listener < 0) _exit(0);
        char text[32] = "";
        int got = syscall(SYS_getppid);
        printf("child reads %zd", read(got, text, 31));
        printf(" %s\n", text);
        fflush(stdout);
        _exit(0);
    }
    int listener = -1;
    read(ends[0], &listener, sizeof listener);
    int pidfd = syscall(SYS_pidfd_open, child, 0);
    listener = listener < 0 ? -1 : syscall(SYS_pidfd_getfd, pidfd, listener, 0);
    if (listener < 0) {
        printf("no supervision\n");
    } else {
        struct seccomp_notif asked = {0};
        say("asked", ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked));
        struct addfd add = {.id = asked.id, .srcfd = fd};
        int number = ioctl(listener, ADDFD_IOCTL, &add);
        struct seccomp_notif_resp answer = {.id = asked.id, .val = number};
        int answered = ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
        waitpid(child, NULL, 0);
        printf("handed %d answered %d\n", number >= 0, answered);
    }
    waitpid(child, NULL, 0);
    printf("at %ld\n", (long)lseek(fd, 0, SEEK_CUR));
    close(fd), close(listener), close(pidfd), close(ends[0]), close(ends[1]);
}

static void mounts(void) {
    fflush(stdout);
    if (!fork()) {
        int fd;
        if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
            printf("no namespaces\n");
        } else {
            char text[32] = "";
            fd = file("mounted", "mounted");
            mkdir("/tmp/handed.dir", 0755);
            int to = open("/tmp/handed", O_RDWR | O_CREAT, 0644);
            int tree = syscall(SYS_open_tree, fd, "", AT_EMPTY_PATH | 1);
            printf("tree %d", tree >= 0);
            printf(" move %d\n", (int)syscall(SYS_move_mount, tree, "", AT_FDCWD, "/tmp/handed", 4));
            to = open("/tmp/handed", O_RDONLY);
            show("bound", to);
            // The other way: something else is put over a file of ours.
            int away = open("/etc/hostname", O_RDONLY);
            tree = syscall(SYS_open_tree, away, "", AT_EMPTY_PATH | 1);
            printf("over %d\n", (int)syscall(SYS_move_mount, tree, "", fd, "", 4 | 0x40));
            int over = open(path("mounted"), O_RDONLY), hidden = read(over, text, 7) == 7 && strcmp(text, "mounted");
            printf("hidden %d others %d\n", hidden, access(path("other"), F_OK));
            int context = syscall(SYS_fsopen, "overlay", 0);
            printf("set fd %d", context < 0 ? 0 : (int)syscall(SYS_fsconfig, context, 5, "none", NULL, fd));
            printf(" on a file %d %d\n", (int)syscall(SYS_fsconfig, fd, 5, "none", NULL, fd), errno);
        }
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    unlink("/tmp/handed"), rmdir("/tmp/handed.dir");
    int fd = open(path("mounted"), O_RDWR);
    show("mounted", fd);
    close(fd);
}

static void others(void) {
    int fd = file("others", "#!/bin/sh\necho executed \"$@\"\n");
    fchmod(fd, 0755);
    union { struct file_handle handle; char room[sizeof(struct file_handle) + 128]; } h = {{128}};
    int id;
    printf("handle %d", name_to_handle_at(fd, "", &h.handle, &id, AT_EMPTY_PATH));
    printf(" of a name %d\n", (h.handle.handle_bytes = 128, name_to_handle_at(AT_FDCWD, path("others"), &h.handle, &id, 0)));
    say("program", prctl(PR_SET_MM, PR_SET_MM_EXE_FILE, fd, 0, 0));
    // From another process, and from oneself.
    int self = syscall(SYS_pidfd_open, getpid(), 0), mine = syscall(SYS_pidfd_getfd, self, fd, 0);
    lseek(fd, 3, SEEK_SET);
    show("mine", mine);
    say("quota", syscall(443, fd, 0x800700 | 0, 0, NULL) < 0);
    say("pidfd", syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0));
    void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    printf("mapped %.9s\n", (char *)map);
    munmap(map, 4096);
    close(mine), close(self);
    fflush(stdout);
    int read_only = open(path("others"), O_RDONLY);
    close(fd);
    if (!fork()) {
        char *args[] = {"others", "by", "number", NULL}, *env[] = {"PATH=/bin:/usr/bin", NULL};
        syscall(SYS_execveat, read_only, "", args, env, AT_EMPTY_PATH);
        _exit(errno);
    }
    int status;
    wait(&status);
    printf("execveat %d\n", WEXITSTATUS(status));
    close(read_only);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    dir = argv[argc - 1];
    char name[] = "/tmp/handed.XXXXXX";
    beside = mkstemp(name);
    unlink(name);
    loops();
    clones();
    compares();
    watches();
    supervised();
    mounts();
    others();
    landlock();
    return 0;
}

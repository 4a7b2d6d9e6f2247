// Descriptor numbers: what the kernel gives out in the top eighth of the table, limits that change while files are open,
// and what works when there is no number left. argv[1]: a static program; argv[2]: a directory.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIMIT 1024
#define FREE 24

static const char *dir;

static const char *path(const char *name) {
    static char text[4][4096];
    static int next;
    char *to = text[next++ % 4];
    snprintf(to, 4096, "%s/%s", dir, name);
    return to;
}

static void say(const char *what, long ret) { printf("%s %ld %s\n", what, ret, ret < 0 ? strerror(errno) : ""); }

static int limit(pid_t who, long soft, struct rlimit *before) {
    struct rlimit is;
    if (prlimit(who, RLIMIT_NOFILE, NULL, &is)) return -1;
    if (before) *before = is;
    is.rlim_cur = soft;
    return prlimit(who, RLIMIT_NOFILE, &is, NULL);
}

// Takes every number; the highest FREE of those are given back.
static int fill(int keep_none) {
    int null = open("/dev/null", O_RDWR), last = null, all[LIMIT], n = 0;
    for (int fd; (fd = dup(null)) >= 0; last = fd) all[n++] = fd;
    int bad = 0;
    for (int i = keep_none ? n : n - FREE; i < n; i++) bad += close(all[i]) != 0;
    printf("filled %d left %d\n", n > LIMIT - 100, bad);
    return null;
}

static void empty(int null) {
    struct stat a, b;
    fstat(null, &a);
    int bad = 0;
    for (int fd = null + 1; fd < LIMIT; fd++)
        if (!fstat(fd, &b) && a.st_rdev == b.st_rdev && S_ISCHR(b.st_mode)) bad += close(fd) != 0;
    printf("emptied %d\n", bad + close(null));
}

static int high(int fd) { return fd >= LIMIT - 128; }

// All that can be done with any descriptor.
static void common(const char *what, int fd) {
    struct stat st;
    struct pollfd p = {fd, POLLIN | POLLOUT, 0};
    int other, third;
    printf("%s high %d fstat %d getfd %d", what, high(fd), fstat(fd, &st), fcntl(fd, F_GETFD));
    printf(" cloexec %d", fcntl(fd, F_SETFD, FD_CLOEXEC));
    printf(" %d getfl %d", fcntl(fd, F_GETFD), fcntl(fd, F_GETFL) >= 0);
    printf(" poll %d", poll(&p, 1, 0));
    printf(" %x", p.revents & POLLNVAL);
    printf(" dup %d %d", high(other = dup(fd)), high(third = fcntl(fd, F_DUPFD_CLOEXEC, LIMIT - 60)));
    printf(" dup2 %d", dup2(fd, other) == other);
    printf(" close %d %d", close(other), close(third));
    printf(" %d", close(fd));
    printf(" again %d\n", close(fd) < 0 ? errno : 0);
}

static void kinds(void) {
    int pair[2], ends[2], fd;
    char text[8] = "";
    int null = fill(0);
    printf("pair %d", socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    printf(" write %zd", write(pair[0], "abc", 3));
    printf(" read %zd %s\n", read(pair[1], text, 8), text);
    printf("send %zd", send(pair[1], "de", 2, 0));
    printf(" recv %zd\n", recv(pair[0], text, 8, 0));
    // A descriptor comes through a socket.
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {text, 1};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_len = CMSG_LEN(sizeof(int)), c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(c), &null, sizeof null);
    printf("sendmsg %zd", sendmsg(pair[0], &m, 0));
    printf(" recvmsg %zd\n", recvmsg(pair[1], &m, 0));
    memcpy(&fd, CMSG_DATA(c), sizeof fd);
    common("passed", fd);
    common("pair", pair[0]);
    common("pair", pair[1]);
    printf("pipe2 %d", pipe2(ends, O_CLOEXEC));
    printf(" write %zd", write(ends[1], "xyz", 3));
    printf(" read %zd\n", read(ends[0], text, 8));
    common("pipe", ends[0]);
    common("pipe", ends[1]);
    common("epoll", epoll_create1(0));
    common("eventfd", eventfd(3, 0));
    common("timerfd", timerfd_create(CLOCK_MONOTONIC, 0));
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGUSR1);
    common("signalfd", signalfd(-1, &set, 0));
    common("inotify", inotify_init1(0));
    common("memfd", memfd_create("numbers", 0));
    common("pidfd", syscall(SYS_pidfd_open, getpid(), 0));
    common("null", open("/dev/null", O_RDONLY));
    common("directory", open("/proc", O_RDONLY | O_DIRECTORY));
    struct sockaddr_un at = {AF_UNIX};
    snprintf(at.sun_path + 1, 64, "numbers-%d", getpid());
    int server = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);
    printf("bind %d", bind(server, (void *)&at, sizeof at));
    printf(" listen %d", listen(server, 1));
    printf(" connect %d\n", connect(client, (void *)&at, sizeof at));
    common("accepted", accept4(server, NULL, NULL, SOCK_CLOEXEC));
    common("client", client);
    common("server", server);
    // And files, as ever.
    fd = open(path("kinds"), O_RDWR | O_CREAT, 0644);
    printf("file high %d write %zd", high(fd), write(fd, "file", 4));
    printf(" pread %zd\n", pread(fd, text, 8, 0));
    common("file", fd);
    common("ours", open(path("."), O_RDONLY | O_DIRECTORY));
    empty(null);
}

static void ranges(void) {
    int null = fill(0), fd = open(path("ranges"), O_RDWR | O_CREAT, 0644), ends[2];
    pipe(ends);
    printf("high %d %d\n", high(fd), high(ends[1]));
    say("cloexec", syscall(SYS_close_range, LIMIT - 128, ~0U, 4));
    printf("flags %d %d\n", fcntl(ends[0], F_GETFD), fcntl(fd, F_GETFD));
    say("range", syscall(SYS_close_range, LIMIT - 128, ~0U, 0));
    printf("gone %zd", write(ends[1], "x", 1));
    printf(" %zd", write(fd, "x", 1));
    printf(" %d\n", errno);
    empty(null);
    fd = open(path("ranges"), O_RDWR);
    say("write", write(fd, "again", 5));
    // Whoever closes all that there could be.
    int closed = 0;
    for (int i = 3; i < LIMIT; i++) closed += close(i) == 0;
    printf("closed %d\n", closed > 0);
    fd = open(path("ranges"), O_RDWR);
    char text[8] = "";
    printf("read %zd", read(fd, text, 8));
    struct stat st;
    printf(" %s stat %d", text, stat(path("ranges"), &st));
    printf(" size %ld\n", (long)st.st_size);
    close(fd);
}

static void limits(void) {
    struct rlimit was;
    int fd = open(path("limits"), O_RDWR | O_CREAT, 0644), up = fcntl(fd, F_DUPFD, 700);
    printf("write %zd\n", write(up, "one", 3));
    say("lower", limit(0, 100, &was));
    // What is open stays open, and can still be given to the kernel.
    say("write", write(up, "two", 3));
    say("seek", lseek(fd, 0, SEEK_CUR));
    say("dup above", fcntl(fd, F_DUPFD, 200));
    say("dup2 above", dup2(fd, 200));
    say("flock", flock(up, LOCK_EX));
    say("write", write(up, "three", 5));
    say("seek", lseek(fd, 0, SEEK_CUR));
    say("close", close(up));
    int new = open(path("new"), O_RDWR | O_CREAT, 0644);
    printf("new %d %zd\n", new >= 0, write(new, "new", 3));
    say("raise", limit(0, was.rlim_cur, NULL));
    up = fcntl(fd, F_DUPFD, 900);
    printf("up %d write %zd", up >= 900, write(up, "four", 4));
    printf(" close %d\n", close(up));
    fflush(stdout);
    // Somebody else's doing.
    pid_t parent = getpid(), child = fork();
    if (!child) _exit(limit(parent, 64, NULL) ? 1 : 0);
    int status;
    waitpid(child, &status, 0);
    struct rlimit is;
    getrlimit(RLIMIT_NOFILE, &is);
    printf("outside %d now %ld\n", status, (long)is.rlim_cur);
    say("above", fcntl(fd, F_DUPFD, 70));
    printf("write %zd new %zd\n", pwrite(fd, "5", 1, 0), write(new, "6", 1));
    struct rlimit low = {1, is.rlim_max};
    say("set", setrlimit(RLIMIT_NOFILE, &low));
    say("open", open(path("limits"), O_RDONLY));
    say("flock", flock(new, LOCK_SH));
    say("back", limit(0, was.rlim_cur, NULL));
    getrlimit(RLIMIT_NOFILE, &is);
    printf("same %d\n", is.rlim_cur == was.rlim_cur);
    printf("close %d %d\n", close(fd), close(new));
}

static void full(char **argv) {
    char text[16] = "";
    int fd = open(path("full"), O_RDWR | O_CREAT | O_TRUNC, 0644), locked = open(path("locked"), O_RDWR | O_CREAT, 0644);
    write(fd, "contents", 8);
    int null = fill(1);
    say("open", open(path("full"), O_RDONLY));
    say("make", open(path("never"), O_RDWR | O_CREAT, 0644));
    say("openat", openat(AT_FDCWD, path("."), O_RDONLY | O_DIRECTORY));
    say("not made", access(path("never"), F_OK));
    say("pread", pread(fd, text, 8, 0));
    say("mkdir", mkdir(path("dir"), 0755));
    say("flock", flock(locked, LOCK_EX));
    printf("locked write %zd\n", write(locked, "held", 4));
    say("unlink", unlink(path("locked")));
    say("rmdir", rmdir(path("dir")));
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        struct stat st;
        say("child open", open(path("full"), O_RDONLY));
        say("child make", open(path("never"), O_RDWR | O_CREAT, 0644));
        say("child read", pread(fd, text, 3, 2));
        say("child stat", stat(path("full"), &st));
        say("child size", st.st_size);
        say("child fstat", fstat(fd, &st));
        say("child size", st.st_size);
        say("child link", link(path("full"), path("linked")));
        say("child mkdir", mkdir(path("made"), 0755));
        say("child write", write(fd, " more", 5));
        say("child flock", flock(fd, LOCK_EX));
        say("child write", write(fd, "!", 1));
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    say("after", write(fd, "?", 1));
    say("at", lseek(fd, 3, SEEK_SET));
    fflush(stdout);
    child = fork();
    if (!child) {
        dup2(fd, 0);
        execl(argv[1], argv[1], "cat", (char *)NULL);
        say("exec", -1);
        _exit(1);
    }
    waitpid(child, NULL, 0);
    empty(null);
    memset(text, 0, sizeof text);
    struct stat st;
    printf("\nat %ld fstat %d", (long)lseek(fd, 0, SEEK_CUR), fstat(fd, &st));
    printf(" size %ld\n", (long)st.st_size);
    close(fd), close(locked);
}

int main(int argc, char **argv) {
    dir = argv[argc - 1];
    if (limit(0, LIMIT, NULL)) return perror("limit"), 1;
    // Whoever serves files has what it needs for that.
    close(open(path("first"), O_RDWR | O_CREAT, 0644));
    kinds();
    ranges();
    limits();
    full(argv);
    return 0;
}

// Every call that takes a descriptor, as the first one on it: just opened, dup'ed, in a child of fork, in a new program; on
// files open in every way, and on a directory. Prints what it answers, and where the file stands afterwards. argv: [all]
// DIRECTORY; all: every way of each kind, and what depends on the file system.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <unistd.h>

#define DEPENDS 1

static char detail[512];
static char buffer[4096];

struct op {
    const char *name;
    int flags;
    long (*run)(int fd);
};

static struct iovec two[2] = {{"AB", 2}, {"CD", 2}};
static struct iovec room[2] = {{buffer, 3}, {buffer + 3, 5}};

static long pipe_end(int write_end) {
    static int ends[2] = {-1, -1};
    if (ends[0] < 0) pipe2(ends, O_NONBLOCK), write(ends[1], "piped", 5);
    return ends[write_end];
}

static long lock_about(int fd, int command, short type, short whence, long start, long len) {
    struct flock lock = {.l_type = type, .l_whence = whence, .l_start = start, .l_len = len, .l_pid = command >= 36 ? 0 : 77};
    long ret = fcntl(fd, command, &lock);
    snprintf(detail, sizeof detail, "type %d whence %d start %ld len %ld pid %d", lock.l_type, lock.l_whence, (long)lock.l_start,
             (long)lock.l_len, lock.l_pid);
    return ret;
}

static long map(int fd, int prot, int flags, long at) {
    char *p = mmap(NULL, 4096, prot, flags, fd, at);
    if (p == MAP_FAILED) return -1;
    if (at == 0) snprintf(detail, sizeof detail, "%.5s", p);
    if (at == 0 && prot & PROT_WRITE) p[0] = 'M';
    munmap(p, 4096);
    return 0;
}

static long received(int fd) {
    int ends[2], got = -1;
    char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_len = CMSG_LEN(sizeof(int)), c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    long ret = sendmsg(ends[0], &m, 0);
    int why = errno;
    if (ret > 0 && recvmsg(ends[1], &m, 0) > 0) memcpy(&got, CMSG_DATA(c), sizeof got);
    long n = got < 0 ? -2 : read(got, buffer, 3);
    snprintf(detail, sizeof detail, "read %ld", n);
    close(got), close(ends[0]), close(ends[1]);
    errno = why;
    return ret;
}

static long aio(int fd, int code) {
    aio_context_t context = 0;
    struct iocb block = {.aio_lio_opcode = code, .aio_fildes = fd, .aio_buf = (long)buffer, .aio_nbytes = 4, .aio_offset = 1};
    struct iocb *list[1] = {&block};
    struct io_event event;
    strcpy(buffer, "aio!");
    if (syscall(SYS_io_setup, 4, &context) < 0) return -1;
    long ret = syscall(SYS_io_submit, context, 1, list);
    int why = errno;
    if (ret == 1 && syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1) snprintf(detail, sizeof detail, "%ld", (long)event.res);
    syscall(SYS_io_destroy, context);
    errno = why;
    return ret;
}

static long stats(int ret, struct stat *st) {
    if (!ret) snprintf(detail, sizeof detail, "mode %o size %ld links %ld", st->st_mode, S_ISDIR(st->st_mode) ? -1 : (long)st->st_size, S_ISDIR(st->st_mode) ? -1 : (long)st->st_nlink);
    return ret;
}

static long listed(int fd) {
    long n = syscall(SYS_getdents64, fd, buffer, sizeof buffer);
    return n > 0 ? 1 : n;
}

static long opened(int fd, const char *form) {
    char name[64];
    snprintf(name, sizeof name, form, fd);
    int other = open(name, O_RDONLY);
    if (other < 0) return -1;
    snprintf(detail, sizeof detail, "read %ld", (long)read(other, buffer, 4));
    return close(other);
}

static long bound(int fd) {
    struct sockaddr address = {AF_UNIX};
    return bind(fd, &address, sizeof address);
}

static long copied(int fd, int there) {
    int other = open("/dev/shm", O_RDWR | O_TMPFILE, 0600);
    if (other < 0) return 0;
    write(other, "other", 5), lseek(other, 0, SEEK_SET);
    long ret = there ? copy_file_range(fd, NULL, other, NULL, 4, 0) : copy_file_range(other, NULL, fd, NULL, 4, 0);
    int why = errno;
    close(other);
    errno = why;
    // Between file systems, some kernels do it and some do not.
    return ret < 0 && why == EXDEV ? 4 : ret;
}

static long selected(int fd) {
    fd_set read_set, write_set;
    struct timeval none = {0, 0};
    FD_ZERO(&read_set);
    FD_ZERO(&write_set);
    FD_SET(fd, &read_set);
    FD_SET(fd, &write_set);
    return select(fd + 1, &read_set, &write_set, NULL, &none);
}

static long polled(int fd) {
    struct pollfd p = {fd, POLLIN | POLLOUT | POLLPRI, 0};
    long ret = poll(&p, 1, 0);
    snprintf(detail, sizeof detail, "%x", p.revents);
    return ret;
}

#define OP(name, ...) static long name(int fd) { return __VA_ARGS__; }
OP(o_read, read(fd, buffer, 4))
OP(o_read_none, read(fd, buffer, 0))
OP(o_read_bad, read(fd, (void *)8, 4))
OP(o_write, write(fd, "wrote", 5))
OP(o_write_none, write(fd, "", 0))
OP(o_write_bad, write(fd, (void *)8, 5))
OP(o_pread, pread(fd, buffer, 4, 2))
OP(o_pread_back, pread(fd, buffer, 4, -1))
OP(o_pwrite, pwrite(fd, "pw", 2, 3))
OP(o_pwrite_back, pwrite(fd, "pw", 2, -1))
OP(o_readv, readv(fd, room, 2))
OP(o_writev, writev(fd, two, 2))
OP(o_readv_many, readv(fd, room, 2000))
OP(o_preadv, preadv(fd, room, 2, 1))
OP(o_pwritev, pwritev(fd, two, 2, 1))
OP(o_preadv2, preadv2(fd, room, 2, -1, 0))
OP(o_preadv2_flag, preadv2(fd, room, 2, 0, 1 << 20))
OP(o_pwritev2, pwritev2(fd, two, 2, 0, RWF_APPEND))
OP(o_pwritev2_sync, pwritev2(fd, two, 2, -1, RWF_DSYNC))
OP(o_seek_set, lseek(fd, 5, SEEK_SET))
OP(o_seek_back, lseek(fd, -5, SEEK_SET))
OP(o_seek_cur, lseek(fd, 2, SEEK_CUR))
OP(o_seek_end, S_ISREG(({ struct stat st = {0}; fstat(fd, &st); st.st_mode; })) ? lseek(fd, -2, SEEK_END) : 0)
OP(o_seek_data, S_ISREG(({ struct stat st = {0}; fstat(fd, &st); st.st_mode; })) ? lseek(fd, 1, SEEK_DATA) : 0)
OP(o_seek_hole, S_ISREG(({ struct stat st = {0}; fstat(fd, &st); st.st_mode; })) ? lseek(fd, 1, SEEK_HOLE) : 0)
OP(o_seek_bad, lseek(fd, 0, 99))
OP(o_fstat, ({ struct stat st; stats(fstat(fd, &st), &st); }))
OP(o_fstatat, ({ struct stat st; stats(fstatat(fd, "", &st, AT_EMPTY_PATH), &st); }))
OP(o_fstatat_flag, ({ struct stat st; fstatat(fd, "", &st, 0x400000); }))
OP(o_fstatat_no, ({ struct stat st; fstatat(fd, "", &st, 0); }))
OP(o_statx, ({ struct statx st; statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &st); }))
OP(o_fstatfs, ({ struct statfs st; fstatfs(fd, &st); }))
OP(o_fsync, fsync(fd))
OP(o_fdatasync, fdatasync(fd))
OP(o_syncfs, syncfs(fd))
OP(o_sync_range, sync_file_range(fd, 0, 4, SYNC_FILE_RANGE_WRITE))
OP(o_sync_range_bad, sync_file_range(fd, 0, 4, 99))
OP(o_truncate, ftruncate(fd, 3))
OP(o_extend, ftruncate(fd, 5000))
OP(o_truncate_bad, ftruncate(fd, -1))
OP(o_allocate, fallocate(fd, 0, 0, 6000))
OP(o_allocate_keep, fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 6000))
OP(o_punch, fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1, 2))
OP(o_punch_bad, fallocate(fd, FALLOC_FL_PUNCH_HOLE, 1, 2))
OP(o_zero, fallocate(fd, FALLOC_FL_ZERO_RANGE, 1, 2))
OP(o_collapse, fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096))
OP(o_insert, fallocate(fd, FALLOC_FL_INSERT_RANGE, 0, 4096))
OP(o_allocate_bad, fallocate(fd, 0, -1, 4))
OP(o_allocate_none, fallocate(fd, 0, 0, 0))
OP(o_allocate_flag, fallocate(fd, 0x100, 0, 4))
OP(o_advise, syscall(SYS_fadvise64, fd, 0, 4, POSIX_FADV_WILLNEED))
OP(o_advise_bad, syscall(SYS_fadvise64, fd, 0, 4, 99))
OP(o_readahead, readahead(fd, 0, 4096))
OP(o_fchmod, fchmod(fd, 0640))
OP(o_fchown, fchown(fd, 1, 2))
OP(o_futimens, futimens(fd, (struct timespec[2]){{1, 2}, {3, 4}}))
OP(o_utimensat, syscall(SYS_utimensat, fd, NULL, NULL, 0))
OP(o_utimensat_empty, utimensat(fd, "", NULL, AT_EMPTY_PATH))
OP(o_fchownat, fchownat(fd, "", 3, 4, AT_EMPTY_PATH))
OP(o_faccessat, syscall(439, fd, "", R_OK, AT_EMPTY_PATH))
OP(o_fchmodat2, syscall(452, fd, "", 0600, AT_EMPTY_PATH))
OP(o_xattr_set, fsetxattr(fd, "user.a", "value", 5, 0))
OP(o_xattr_flag, fsetxattr(fd, "user.a", "value", 5, 9))
OP(o_xattr_get, fgetxattr(fd, "user.none", buffer, 10))
OP(o_xattr_remove, fremovexattr(fd, "user.none"))
OP(o_xattr_name, fsetxattr(fd, "", "value", 5, 0))
OP(o_xattr_space, fsetxattr(fd, "nowhere.a", "value", 5, 0))
OP(o_dupfd, fcntl(fd, F_DUPFD, 100))
OP(o_dupfd_bad, fcntl(fd, F_DUPFD, -1))
OP(o_dupfd_high, fcntl(fd, F_DUPFD, 1 << 30))
OP(o_dup2_self, dup2(fd, fd) == fd)
OP(o_dup3_self, dup3(fd, fd, 0))
OP(o_dup3_flag, dup3(fd, 150, 7))
OP(o_dup2_bad, dup2(fd, -1))
OP(o_dup2_high, dup2(fd, 1 << 30))
OP(o_getfd, fcntl(fd, F_GETFD))
OP(o_setfd, fcntl(fd, F_SETFD, 1) + fcntl(fd, F_GETFD))
OP(o_getfl, fcntl(fd, F_GETFL))
OP(o_setfl, fcntl(fd, F_SETFL, O_APPEND | O_NONBLOCK) ? -1 : fcntl(fd, F_GETFL))
OP(o_setfl_noatime, fcntl(fd, F_SETFL, O_NOATIME) ? -1 : fcntl(fd, F_GETFL))
OP(o_setfl_async, fcntl(fd, F_SETFL, O_ASYNC) ? -1 : fcntl(fd, F_GETFL))
OP(o_setfl_direct, fcntl(fd, F_SETFL, O_DIRECT) ? -1 : fcntl(fd, F_GETFL))
OP(o_getlk, lock_about(fd, F_GETLK, F_WRLCK, SEEK_CUR, 2, 3))
OP(o_getlk_end, lock_about(fd, F_GETLK, F_RDLCK, SEEK_END, -2, 0))
OP(o_getlk_unlock, lock_about(fd, F_GETLK, F_UNLCK, SEEK_SET, 0, 0))
OP(o_getlk_type, lock_about(fd, F_GETLK, 9, SEEK_SET, 0, 0))
OP(o_getlk_whence, lock_about(fd, F_GETLK, F_RDLCK, 9, 0, 0))
OP(o_getlk_before, lock_about(fd, F_GETLK, F_RDLCK, SEEK_SET, -5, 0))
OP(o_getlk_far, lock_about(fd, F_GETLK, F_RDLCK, SEEK_SET, 0x7fffffffffffffff, 5))
OP(o_getlk_back, lock_about(fd, F_GETLK, F_RDLCK, SEEK_SET, 10, -4))
OP(o_getlk_bad, fcntl(fd, F_GETLK, 8))
OP(o_setlk, lock_about(fd, F_SETLK, F_WRLCK, SEEK_CUR, 2, 3))
OP(o_setlk_read, lock_about(fd, F_SETLK, F_RDLCK, SEEK_END, 0, 0))
OP(o_setlk_unlock, lock_about(fd, F_SETLK, F_UNLCK, SEEK_SET, 0, 0))
OP(o_setlk_type, lock_about(fd, F_SETLK, 9, SEEK_SET, 0, 0))
OP(o_setlk_back, lock_about(fd, F_SETLKW, F_WRLCK, SEEK_SET, 2, -3))
OP(o_ofd_getlk, lock_about(fd, F_OFD_GETLK, F_WRLCK, SEEK_CUR, 2, 3))
OP(o_ofd_setlk, lock_about(fd, F_OFD_SETLK, F_WRLCK, SEEK_SET, 2, 3))
OP(o_ofd_pid, ({ struct flock l = {.l_type = F_WRLCK, .l_pid = 5}; fcntl(fd, F_OFD_SETLK, &l); }))
OP(o_getown, fcntl(fd, F_GETOWN))
OP(o_setown, fcntl(fd, F_SETOWN, getpid()) ? -1 : fcntl(fd, F_GETOWN) == getpid())
OP(o_getsig, fcntl(fd, F_GETSIG))
OP(o_setsig, fcntl(fd, F_SETSIG, SIGIO) ? -1 : fcntl(fd, F_GETSIG))
OP(o_setsig_bad, fcntl(fd, F_SETSIG, 999))
OP(o_getlease, fcntl(fd, F_GETLEASE))
OP(o_setlease, fcntl(fd, F_SETLEASE, F_RDLCK))
OP(o_unlease, fcntl(fd, F_SETLEASE, F_UNLCK))
OP(o_notify, fcntl(fd, F_NOTIFY, 0))
OP(o_pipe_size, fcntl(fd, F_GETPIPE_SZ))
OP(o_set_pipe_size, fcntl(fd, F_SETPIPE_SZ, 4096))
OP(o_seals, fcntl(fd, F_GET_SEALS))
OP(o_add_seals, fcntl(fd, F_ADD_SEALS, 0))
OP(o_hint, ({ unsigned long long h = 9; long r = fcntl(fd, F_GET_RW_HINT, &h); snprintf(detail, sizeof detail, "%llu", h); r; }))
OP(o_set_hint, ({ unsigned long long h = 2; fcntl(fd, F_SET_RW_HINT, &h); }))
OP(o_set_hint_bad, ({ unsigned long long h = 99; fcntl(fd, F_SET_RW_HINT, &h); }))
OP(o_fcntl_bad, fcntl(fd, 9999, 0))
OP(o_flock, flock(fd, LOCK_EX | LOCK_NB))
OP(o_flock_bad, flock(fd, 99))
OP(o_fionread, ({ int n = -7; long r = ioctl(fd, FIONREAD, &n); snprintf(detail, sizeof detail, "%d", S_ISREG(({ struct stat st = {0}; fstat(fd, &st); st.st_mode; })) ? n : 0); r; }))
OP(o_fioclex, ioctl(fd, FIOCLEX) + fcntl(fd, F_GETFD))
OP(o_fionclex, ioctl(fd, FIONCLEX) + fcntl(fd, F_GETFD))
OP(o_fionbio, ({ int on = 1; ioctl(fd, FIONBIO, &on) ? -1 : fcntl(fd, F_GETFL); }))
OP(o_fioasync, ({ int on = 1; ioctl(fd, FIOASYNC, &on); }))
OP(o_fioqsize, ({ long long n = 0; long r = ioctl(fd, FIOQSIZE, &n); if (S_ISREG(({ struct stat st = {0}; fstat(fd, &st); st.st_mode; }))) snprintf(detail, sizeof detail, "%lld", n); r; }))
OP(o_figetbsz, ({ int n; ioctl(fd, FIGETBSZ, &n); }))
OP(o_fibmap, ({ int n = 0; ioctl(fd, FIBMAP, &n); }))
OP(o_fiemap, ioctl(fd, 0xc020660b, memset(buffer, 0, 64)))
OP(o_clone_self, ioctl(fd, FICLONE, fd))
OP(o_clone_bad, ioctl(fd, FICLONE, 999))
OP(o_clone_range_bad, ioctl(fd, FICLONERANGE, 8))
OP(o_clone_other, ioctl(fd, FICLONE, open("/proc/version", O_RDONLY)))
OP(o_dedupe, ({ memset(buffer, 0, 64); ((long *)buffer)[1] = 4; buffer[16] = 1; ((long *)buffer)[3] = fd; long r = ioctl(fd, FIDEDUPERANGE, buffer); snprintf(detail, sizeof detail, "%d", *(int *)(buffer + 48)); r; }))
OP(o_getflags, ({ long n; ioctl(fd, FS_IOC_GETFLAGS, &n); }))
OP(o_fsgetxattr, ioctl(fd, FS_IOC_FSGETXATTR, buffer))
OP(o_getversion, ioctl(fd, FS_IOC_GETVERSION, buffer))
OP(o_label, ioctl(fd, FS_IOC_GETFSLABEL, buffer))
OP(o_fstrim, ioctl(fd, FITRIM, 8))
OP(o_resvsp, ({ memset(buffer, 0, 64); ((long *)buffer)[1] = 0; ((long *)buffer)[2] = 5000; ioctl(fd, 0x40305828, buffer); }))
OP(o_unresvsp, ({ memset(buffer, 0, 64); ((long *)buffer)[1] = 1; ((long *)buffer)[2] = 2; ioctl(fd, 0x4030582a, buffer); }))
OP(o_blksize, ioctl(fd, BLKGETSIZE64, buffer))
OP(o_isatty, isatty(fd))
OP(o_winsize, ioctl(fd, TIOCGWINSZ, buffer))
OP(o_ioctl_bad, ioctl(fd, 0x12345678, buffer))
OP(o_map, map(fd, PROT_READ, MAP_SHARED, 0))
OP(o_map_write, map(fd, PROT_READ | PROT_WRITE, MAP_SHARED, 0))
OP(o_map_private, map(fd, PROT_READ | PROT_WRITE, MAP_PRIVATE, 0))
OP(o_map_execute, map(fd, PROT_READ | PROT_EXEC, MAP_PRIVATE, 0))
OP(o_map_odd, map(fd, PROT_READ, MAP_SHARED, 77))
OP(o_map_sync, map(fd, PROT_READ, 3, 0))
OP(o_getdents, listed(fd))
OP(o_getdents_small, syscall(SYS_getdents64, fd, buffer, 4))
OP(o_getdents_old, syscall(SYS_getdents, fd, buffer, 4) < 0 ? -1 : 0)
OP(o_fchdir, ({ long r = fchdir(fd); int e = errno; chdir(".."), errno = e; r; }))
OP(o_openat, openat(fd, "nothing", O_RDONLY))
OP(o_openat_dot, ({ int n = openat(fd, ".", O_RDONLY); n < 0 ? -1 : close(n); }))
OP(o_openat_empty, openat(fd, "", O_RDONLY))
OP(o_openat2, syscall(437, fd, "nothing", (unsigned long[3]){0, 0, 8}, 24))
OP(o_mkdirat, mkdirat(fd, "", 0755))
OP(o_unlinkat, unlinkat(fd, "nothing", 0))
OP(o_renameat, renameat(fd, "nothing", fd, "other"))
OP(o_linkat, linkat(fd, "", fd, "", AT_EMPTY_PATH))
OP(o_readlinkat, readlinkat(fd, "", buffer, 10))
OP(o_symlinkat, symlinkat("a", fd, ""))
OP(o_execveat, syscall(SYS_execveat, fd, "", (char *[]){"x", NULL}, NULL, AT_EMPTY_PATH))
OP(o_sendfile_to_pipe, sendfile(pipe_end(1), fd, NULL, 4))
OP(o_sendfile_from_pipe, sendfile(fd, pipe_end(0), NULL, 4))
OP(o_splice_out, splice(fd, NULL, pipe_end(1), NULL, 4, SPLICE_F_NONBLOCK))
OP(o_splice_in, splice(pipe_end(0), NULL, fd, NULL, 4, SPLICE_F_NONBLOCK))
OP(o_splice_same, splice(fd, NULL, fd, NULL, 4, 0))
OP(o_tee, tee(fd, pipe_end(1), 4, 0))
OP(o_vmsplice, vmsplice(fd, two, 2, 0))
OP(o_copy_out, copied(fd, 1))
OP(o_copy_in, copied(fd, 0))
OP(o_copy_self, copy_file_range(fd, NULL, fd, NULL, 4, 0))
OP(o_copy_far, ({ off64_t at = 4096; copy_file_range(fd, (off64_t[1]){0}, fd, &at, 4, 0); }))
OP(o_copy_flag, copy_file_range(fd, NULL, fd, NULL, 4, 1))
OP(o_poll, polled(fd))
OP(o_select, selected(fd))
OP(o_epoll_add, ({ struct epoll_event e = {EPOLLIN}; int p = epoll_create1(0); long r = epoll_ctl(p, EPOLL_CTL_ADD, fd, &e); int w = errno; close(p), errno = w; r; }))
OP(o_epoll_del, ({ int p = epoll_create1(0); long r = epoll_ctl(p, EPOLL_CTL_DEL, fd, NULL); int w = errno; close(p), errno = w; r; }))
OP(o_epoll_ctl, ({ struct epoll_event e = {EPOLLIN}; epoll_ctl(fd, EPOLL_CTL_ADD, 0, &e); }))
OP(o_epoll_wait, ({ struct epoll_event e; epoll_wait(fd, &e, 1, 0); }))
OP(o_pass, received(fd))
OP(o_bind, bound(fd))
OP(o_listen, listen(fd, 1))
OP(o_accept, accept4(fd, NULL, NULL, 0))
OP(o_send, send(fd, "x", 1, 0))
OP(o_recv, recv(fd, buffer, 1, 0))
OP(o_recvmsg, ({ struct msghdr m = {0}; recvmsg(fd, &m, 0); }))
OP(o_recvmmsg, recvmmsg(fd, (struct mmsghdr *)memset(buffer, 0, 64), 1, 0, NULL))
OP(o_sendmsg, ({ struct msghdr m = {0}; sendmsg(fd, &m, 0); }))
OP(o_sendmmsg, sendmmsg(fd, (struct mmsghdr *)memset(buffer, 0, 64), 1, 0))
OP(o_shutdown, shutdown(fd, 0))
OP(o_getsockopt, ({ int v; socklen_t n = 4; getsockopt(fd, SOL_SOCKET, SO_TYPE, &v, &n); }))
OP(o_setsockopt, ({ int v = 1; setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &v, 4); }))
OP(o_getsockname, ({ struct sockaddr s; socklen_t n = sizeof s; getsockname(fd, &s, &n); }))
OP(o_getpeername, ({ struct sockaddr s; socklen_t n = sizeof s; getpeername(fd, &s, &n); }))
OP(o_timer_set, ({ struct itimerspec t = {{0}}; timerfd_settime(fd, 0, &t, NULL); }))
OP(o_timer_get, ({ struct itimerspec t; timerfd_gettime(fd, &t); }))
OP(o_signalfd, ({ sigset_t s; sigemptyset(&s); signalfd(fd, &s, 0); }))
OP(o_inotify_add, inotify_add_watch(fd, "/", IN_OPEN))
OP(o_inotify_remove, inotify_rm_watch(fd, 1))
OP(o_fanotify, syscall(SYS_fanotify_mark, fd, FAN_MARK_ADD, (unsigned long)FAN_OPEN, AT_FDCWD, "/"))
OP(o_setns, syscall(SYS_setns, fd, 0))
OP(o_mq, syscall(SYS_mq_getsetattr, fd, NULL, buffer))
OP(o_mq_send, syscall(SYS_mq_timedsend, fd, "x", 1, 0, NULL))
OP(o_module, syscall(SYS_finit_module, fd, "", 0xffff))
OP(o_ring, syscall(426, fd, 1, 0, 0, NULL, 0))
OP(o_ring_register, syscall(427, fd, 0, NULL, 0))
OP(o_aio_read, aio(fd, IOCB_CMD_PREAD))
OP(o_aio_write, aio(fd, IOCB_CMD_PWRITE))
OP(o_aio_sync, aio(fd, IOCB_CMD_FSYNC))
OP(o_handle, ({ struct file_handle h = {0}; int id; name_to_handle_at(fd, "", &h, &id, AT_EMPTY_PATH); }))
OP(o_by_handle, ({ struct { struct file_handle h; char r[8]; } h = {{8, 99}}; open_by_handle_at(fd, &h.h, O_RDONLY); }))
OP(o_landlock, syscall(445, fd, 1, buffer, 0))
OP(o_restrict, syscall(446, fd, 0))
OP(o_fsconfig, syscall(431, fd, 0, "a", NULL, 0))
OP(o_fsmount, syscall(432, fd, 0, 0))
OP(o_pidfd, syscall(424, fd, 0, NULL, 0))
OP(o_pidfd_getfd, syscall(438, fd, 0, 0))
OP(o_cachestat, syscall(451, fd, (long[2]){0, 0}, buffer, 0))
OP(o_proc, opened(fd, "/proc/self/fd/%d"))
OP(o_dev, opened(fd, "/dev/fd/%d"))
OP(o_proc_pid, ({ char name[64]; snprintf(name, 64, "/proc/%d/fd/%%d", getpid()); opened(fd, name); }))
OP(o_proc_thread, opened(fd, "/proc/thread-self/fd/%d"))
OP(o_proc_stat, ({ char name[64]; struct stat st; snprintf(name, 64, "/proc/self/fd/%d", fd); stats(stat(name, &st), &st); }))
OP(o_close, close(fd) ? -1 : close(fd))
OP(o_close_range, syscall(436, fd, fd, 0) ? -1 : close(fd))
OP(o_close_range_bad, syscall(436, fd, fd, 99))
#undef OP

#define OP(name, flags) {#name, flags, o_##name}
static const struct op OPS[] = {
    OP(read, 0), OP(read_none, 0), OP(read_bad, 0), OP(write, 0), OP(write_none, 0), OP(write_bad, 0), OP(pread, 0), OP(pread_back, 0), OP(pwrite, 0),
    OP(pwrite_back, 0), OP(readv, 0), OP(writev, 0), OP(readv_many, 0), OP(preadv, 0), OP(pwritev, 0), OP(preadv2, 0), OP(preadv2_flag, 0),
    OP(pwritev2, 0), OP(pwritev2_sync, 0), OP(seek_set, 0), OP(seek_back, 0), OP(seek_cur, 0), OP(seek_end, 0), OP(seek_data, DEPENDS),
    OP(seek_hole, 0), OP(seek_bad, 0), OP(fstat, 0), OP(fstatat, 0), OP(fstatat_flag, 0), OP(fstatat_no, 0), OP(statx, 0), OP(fstatfs, 0), OP(fsync, 0),
    OP(fdatasync, 0), OP(syncfs, 0), OP(sync_range, 0), OP(sync_range_bad, 0), OP(truncate, 0), OP(extend, 0), OP(truncate_bad, 0),
    OP(allocate, 0), OP(allocate_keep, 0), OP(punch, 0), OP(punch_bad, 0), OP(zero, DEPENDS), OP(collapse, DEPENDS), OP(insert, DEPENDS),
    OP(allocate_bad, 0), OP(allocate_none, 0), OP(allocate_flag, 0), OP(advise, 0), OP(advise_bad, 0), OP(readahead, 0), OP(fchmod, 0),
    OP(fchown, 0), OP(futimens, 0), OP(utimensat, 0), OP(utimensat_empty, 0), OP(fchownat, 0), OP(faccessat, 0), OP(fchmodat2, 0),
    OP(xattr_set, DEPENDS), OP(xattr_flag, 0), OP(xattr_get, DEPENDS), OP(xattr_remove, DEPENDS), OP(xattr_name, 0), OP(xattr_space, 0), OP(dupfd, 0),
    OP(dupfd_bad, 0), OP(dupfd_high, 0), OP(dup2_self, 0), OP(dup3_self, 0), OP(dup3_flag, 0), OP(dup2_bad, 0), OP(dup2_high, 0),
    OP(getfd, 0), OP(setfd, 0), OP(getfl, 0), OP(setfl, 0), OP(setfl_noatime, 0), OP(setfl_async, DEPENDS), OP(setfl_direct, DEPENDS), OP(getlk, 0),
    OP(getlk_end, 0), OP(getlk_unlock, 0), OP(getlk_type, 0), OP(getlk_whence, 0), OP(getlk_before, 0), OP(getlk_far, 0), OP(getlk_back, 0),
    OP(getlk_bad, 0), OP(setlk, 0), OP(setlk_read, 0), OP(setlk_unlock, 0), OP(setlk_type, 0), OP(setlk_back, 0), OP(ofd_getlk, 0), OP(ofd_setlk, 0),
    OP(ofd_pid, 0), OP(getown, 0), OP(setown, 0), OP(getsig, 0), OP(setsig, 0), OP(setsig_bad, 0), OP(getlease, 0), OP(setlease, DEPENDS),
    OP(unlease, 0), OP(notify, 0), OP(pipe_size, 0), OP(set_pipe_size, 0), OP(seals, DEPENDS), OP(add_seals, DEPENDS), OP(hint, 0), OP(set_hint, 0),
    OP(set_hint_bad, 0), OP(fcntl_bad, 0), OP(flock, 0), OP(flock_bad, 0), OP(fionread, 0), OP(fioclex, 0), OP(fionclex, 0), OP(fionbio, 0),
    OP(fioasync, 0), OP(fioqsize, 0), OP(figetbsz, 0), OP(fibmap, DEPENDS), OP(fiemap, DEPENDS), OP(clone_self, DEPENDS), OP(clone_bad, 0),
    OP(clone_range_bad, 0), OP(clone_other, DEPENDS), OP(dedupe, DEPENDS), OP(getflags, DEPENDS), OP(fsgetxattr, DEPENDS), OP(getversion, DEPENDS),
    OP(label, DEPENDS), OP(fstrim, DEPENDS), OP(resvsp, DEPENDS), OP(unresvsp, DEPENDS), OP(blksize, 0), OP(isatty, 0), OP(winsize, 0), OP(ioctl_bad, 0), OP(map, 0),
    OP(map_write, 0), OP(map_private, 0), OP(map_execute, 0), OP(map_odd, 0), OP(map_sync, DEPENDS), OP(getdents, 0), OP(getdents_small, 0),
    OP(getdents_old, 0), OP(fchdir, 0), OP(openat, 0), OP(openat_dot, 0), OP(openat_empty, 0), OP(openat2, 0), OP(mkdirat, 0), OP(unlinkat, 0),
    OP(renameat, 0), OP(linkat, 0), OP(readlinkat, 0), OP(symlinkat, 0), OP(execveat, 0), OP(sendfile_to_pipe, 0), OP(sendfile_from_pipe, 0),
    OP(splice_out, 0), OP(splice_in, 0), OP(splice_same, 0), OP(tee, 0), OP(vmsplice, 0), OP(copy_out, 0), OP(copy_in, 0), OP(copy_self, 0), OP(copy_far, 0),
    OP(copy_flag, 0), OP(poll, 0), OP(select, 0), OP(epoll_add, DEPENDS), OP(epoll_del, DEPENDS), OP(epoll_ctl, 0), OP(epoll_wait, 0), OP(pass, 0), OP(bind, 0),
    OP(listen, 0), OP(accept, 0), OP(send, 0), OP(recv, 0), OP(recvmsg, 0), OP(recvmmsg, 0), OP(sendmsg, 0), OP(sendmmsg, 0), OP(shutdown, 0),
    OP(getsockopt, 0), OP(setsockopt, 0), OP(getsockname, 0), OP(getpeername, 0), OP(timer_set, 0), OP(timer_get, 0), OP(signalfd, 0),
    OP(inotify_add, 0), OP(inotify_remove, 0), OP(fanotify, 0), OP(setns, 0), OP(mq, 0), OP(mq_send, 0), OP(module, 0), OP(ring, 0),
    OP(ring_register, 0), OP(aio_read, 0), OP(aio_write, 0), OP(aio_sync, DEPENDS), OP(handle, 0), OP(by_handle, DEPENDS), OP(landlock, 0),
    OP(restrict, 0), OP(fsconfig, 0), OP(fsmount, 0), OP(pidfd, 0), OP(pidfd_getfd, 0), OP(cachestat, 0), OP(proc, 0), OP(dev, 0),
    OP(proc_pid, 0), OP(proc_thread, 0), OP(proc_stat, 0), OP(close, 0), OP(close_range, 0), OP(close_range_bad, 0),
};
#define COUNT (sizeof OPS / sizeof *OPS)

static const struct { const char *name; int flags; } KINDS[] = {
    {"read", O_RDONLY}, {"write", O_WRONLY}, {"both", O_RDWR}, {"append", O_RDWR | O_APPEND}, {"sync", O_RDWR | O_DSYNC},
    {"neither", 3}, {"directory", O_RDONLY | O_DIRECTORY}, {"path", O_PATH},
};
static const char *const WAYS[] = {"first", "dup", "fork", "exec"};

static void perform(int op, const char *what, int fd) {
    struct stat st = {0};
    detail[0] = 0;
    errno = 0;
    long ret = OPS[op].run(fd);
    int why = ret < 0 ? errno : 0;
    long at = lseek(fd, 0, SEEK_CUR), ok = fstat(fd, &st), reg = S_ISREG(st.st_mode);
    printf("%s %s %ld %d [%s] at %ld size %ld\n", OPS[op].name, what, ret, why, detail, reg ? at : 0, ok || !reg ? -1 : (long)st.st_size);
    fflush(stdout);
}

int main(int argc, char **argv) {
    char what[64], number[2][16], name[64];
    if (argc == 5 && !strcmp(argv[1], "perform")) {
        perform(atoi(argv[2]), argv[3], atoi(argv[4]));
        return 0;
    }
    int all = argc > 2 && !strcmp(argv[1], "all");
    char *self = realpath(argv[0], NULL);
    if (chdir(argv[argc - 1])) return 1;
    for (int op = 0; op < COUNT; op++) {
        if (OPS[op].flags & DEPENDS && !all) continue;
        for (int kind = 0; kind < sizeof KINDS / sizeof *KINDS; kind++)
            for (int way = 0; way < 4; way++) {
                // The kernel's business from the start.
                if (KINDS[kind].flags & O_PATH && way) continue;
                int main_kind = KINDS[kind].flags == O_RDWR || KINDS[kind].flags & O_DIRECTORY && way % 3 == 0;
                if (!all && !main_kind && ((op + kind) % 6 || way != op % 4)) continue;
                fflush(stdout);
                pid_t child = fork();
                if (!child) {
                    int directory = KINDS[kind].flags & O_DIRECTORY;
                    snprintf(name, sizeof name, directory ? "d%d.%d" : "f%d.%d", getpid(), way);
                    if (directory) {
                        mkdir(name, 0755);
                    } else {
                        int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
                        write(fd, "contents of a file", 18), close(fd);
                    }
                    int fd = open(name, KINDS[kind].flags);
                    if (!directory) lseek(fd, 3, SEEK_SET);
                    snprintf(what, sizeof what, "%s %s", KINDS[kind].name, WAYS[way]);
                    alarm(20);
                    if (way == 1) fd = dup(fd);
                    if (way == 3) {
                        sprintf(number[0], "%d", op), sprintf(number[1], "%d", fd);
                        if (!fork()) execl(self, self, "perform", number[0], what, number[1], (char *)NULL);
                        wait(NULL);
                    } else if (way == 2) {
                        if (!fork()) perform(op, what, fd), _exit(0);
                        wait(NULL);
                    } else {
                        perform(op, what, fd);
                    }
                    unlink(name), rmdir(name);
                    _exit(0);
                }
                int status;
                waitpid(child, &status, 0);
                if (status) printf("%s ends with %x\n", OPS[op].name, status);
            }
    }
    printf("%zu calls\n", COUNT);
    return 0;
}

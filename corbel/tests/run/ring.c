// io_uring by hand: a file that is open before there is a ring, one that is opened afterwards, and a
// path that the ring itself opens; then the ring goes to a process that made none, by a pidfd and over exec.
// Prints what it read; "none" where the kernel has no rings. With -DOWN no call of a ring is libc's.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef OWN
static long call(long nr, long a, long b, long c, long d) {
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = 0;
  register long r9 __asm__("r9") = 0;
  long ret;
  __asm__ volatile("syscall"
                   : "=a"(ret)
                   : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return ret;
}
#else
static long call(long nr, long a, long b, long c, long d) {
  long ret = syscall(nr, a, b, c, d, 0, 0);
  return ret < 0 ? -errno : ret;
}
#endif

static int ring;
static char *sq, *cq;
static struct io_uring_sqe *sqes;
static struct io_uring_params p;

static unsigned *at(char *base, unsigned off) { return (unsigned *)(base + off); }

static int map(void) {
  sq = mmap(0, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
            IORING_OFF_SQ_RING);
  cq = mmap(0, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE,
            MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_CQ_RING);
  sqes = mmap(0, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
              IORING_OFF_SQES);
  return sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED ? -1 : 0;
}

static int setup(void) {
  ring = call(SYS_io_uring_setup, 8, (long)&p, 0, 0);
  return ring < 0 ? ring : map();
}

static int go(int op, int fd, const void *addr, unsigned len, long long off, unsigned flags) {
  unsigned tail = *at(sq, p.sq_off.tail), slot = tail & *at(sq, p.sq_off.ring_mask);
  struct io_uring_sqe *e = &sqes[slot];
  memset(e, 0, sizeof *e);
  e->opcode = op, e->fd = fd, e->addr = (unsigned long)addr, e->len = len, e->off = off, e->open_flags = flags;
  at(sq, p.sq_off.array)[slot] = slot;
  atomic_store_explicit((_Atomic unsigned *)at(sq, p.sq_off.tail), tail + 1, memory_order_release);
  int ret = call(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS);
  if (ret < 0) return ret;
  unsigned head = *at(cq, p.cq_off.head);
  struct io_uring_cqe *c = (void *)(cq + p.cq_off.cqes);
  int res = c[head & *at(cq, p.cq_off.ring_mask)].res;
  atomic_store_explicit((_Atomic unsigned *)at(cq, p.cq_off.head), head + 1, memory_order_release);
  return res;
}

static void show(const char *what, int fd) {
  char buf[64] = {0};
  struct stat st = {0};
  int n = pread(fd, buf, 63, 0);
  printf("%s: %d \"%s\" size %lld at %lld\n", what, n, n > 0 ? buf : "", fstat(fd, &st) ? -1LL : (long long)st.st_size,
         (long long)lseek(fd, 0, SEEK_CUR));
}

// A ring that somebody else has made.
static void theirs(const char *name, int number) {
  int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
  ring = number;
  printf("%s: libc write %d mapped %d\n", name, (int)write(file, "libc ", 5), map());
  printf("%s: ring write %d\n", name, go(IORING_OP_WRITE, file, "ring", 4, 5, 0));
  printf("%s: ring append %d\n", name, go(IORING_OP_WRITE, file, "!", 1, -1, 0));
  show(name, file);
  fflush(stdout);
}

static int pipes[2];

// Reads what its maker knows of the ring.
static int learn(int from) { return read(from, &p, sizeof p) == sizeof p && read(from, &ring, sizeof ring) == sizeof ring; }

static void tell(void) {
  fflush(stdout);
  write(pipes[1], &p, sizeof p);
  write(pipes[1], &ring, sizeof ring);
}

int main(int argc, char **argv) {
  if (argc == 3) {
    if (!learn(atoi(argv[2]))) return 2;
    theirs("ring/execed", ring);
    return 0;
  }
  if (chdir(argv[1])) return 1;
  mkdir("ring", 0755);
  pipe(pipes);
  int maker = getpid(), other = fork();
  if (!other) {
    close(pipes[1]);
    if (!learn(pipes[0])) _exit(0);
    int pidfd = syscall(SYS_pidfd_open, maker, 0);
    theirs("ring/passed", syscall(SYS_pidfd_getfd, pidfd, ring, 0));
    _exit(0);
  }
  int before = open("ring/before", O_RDWR | O_CREAT | O_TRUNC, 0644), copy = dup(before);
  int dir = open("ring", O_RDONLY | O_DIRECTORY);
  printf("write %d\n", (int)write(before, "first ", 6));
  int no = setup();
  if (no) return printf("none: %s\n", strerror(-no)), 0;
  printf("ring write %d\n", go(IORING_OP_WRITE, before, "second", 6, 6, 0));
  printf("ring append %d\n", go(IORING_OP_WRITE, copy, "!", 1, -1, 0));
  show("before", before);
  int after = open("ring/after", O_RDWR | O_CREAT | O_TRUNC, 0644);
  printf("ring write %d fsync %d\n", go(IORING_OP_WRITE, after, "third", 5, 0, 0), go(IORING_OP_FSYNC, after, 0, 0, 0, 0));
  show("after", after);
  int opened = go(IORING_OP_OPENAT, dir, "made", 0644, 0, O_RDWR | O_CREAT);
  printf("ring open %d write %d\n", opened >= 0, (int)write(opened, "fourth", 6));
  show("made", opened);
  // One that is not to be used yet says so (EBADFD), and not that it is none.
  struct io_uring_params off = {.flags = IORING_SETUP_R_DISABLED};
  printf("disabled %ld\n", call(SYS_io_uring_enter, call(SYS_io_uring_setup, 4, (long)&off, 0, 0), 0, 0, 0));
  char buf[16] = {0};
  printf("ring read %d %s\n", go(IORING_OP_READ, after, buf, 15, 0, 0), buf);
  fflush(stdout);
  if (!fork()) {
    int child = open("ring/child", O_RDWR | O_CREAT, 0600);
    printf("child %d\n", go(IORING_OP_WRITE, child, "fifth", 5, 0, 0));
    show("child", child);
    fflush(stdout);
    _exit(0);
  }
  wait(0);
  printf("rename %d unlink %d\n", rename("ring/after", "ring/moved"), unlink("ring/before"));
  show("moved", after);
  show("gone", before);
  fflush(stdout);
  tell();
  waitpid(other, 0, 0);
  char number[16];
  tell();
  fcntl(ring, F_SETFD, 0);
  sprintf(number, "%d", pipes[0]);
  execl(argv[0], argv[0], argv[1], number, (char *)0);
  return 3;
}

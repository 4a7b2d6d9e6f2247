// liburing, which makes its system calls itself: queues of writes and reads on files that were open before and that
// are opened afterwards, registered files, and a copy with many requests under way.
#define _GNU_SOURCE
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct io_uring ring;

static int finish(void) {
  struct io_uring_cqe *cqe;
  int ret = io_uring_submit_and_wait(&ring, 1);
  if (ret < 0 || (ret = io_uring_wait_cqe(&ring, &cqe)) < 0) return ret;
  ret = cqe->res;
  io_uring_cqe_seen(&ring, cqe);
  return ret;
}

static int put(int fd, const char *text, long long at) {
  io_uring_prep_write(io_uring_get_sqe(&ring), fd, text, strlen(text), at);
  return finish();
}

static void show(const char *what, int fd) {
  char text[64] = {0};
  struct stat st = {0};
  int n = pread(fd, text, 63, 0);
  printf("%s: %d \"%s\" size %lld\n", what, n, text, fstat(fd, &st) ? -1LL : (long long)st.st_size);
}

int main(int argc, char **argv) {
  if (chdir(argv[1])) return 1;
  int before = open("before", O_RDWR | O_CREAT | O_TRUNC, 0644);
  printf("write %d\n", (int)write(before, "libc ", 5));
  int no = io_uring_queue_init(64, &ring, 0);
  if (no < 0) return printf("none: %s\n", strerror(-no)), 0;
  printf("put %d\n", put(before, "ring", 5));
  show("before", before);
  int after = open("after", O_RDWR | O_CREAT | O_TRUNC, 0644);
  printf("put %d\n", put(after, "after", 0));
  show("after", after);
  int known[2] = {before, after};
  printf("register %d\n", io_uring_register_files(&ring, known, 2));
  struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
  io_uring_prep_write(sqe, 1, "fixed", 5, 5);
  sqe->flags |= IOSQE_FIXED_FILE;
  printf("fixed %d\n", finish());
  show("after", after);
  static char blocks[32][4096], back[32][4096];
  int copy = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0644), done = 0, good = 0;
  for (int i = 0; i < 32; i++) memset(blocks[i], 'a' + i, 4096), io_uring_prep_write(io_uring_get_sqe(&ring), copy, blocks[i], 4096, i * 4096);
  for (int i = 0; i < 32; i++) done += finish() == 4096;
  for (int i = 0; i < 32; i++) io_uring_prep_read(io_uring_get_sqe(&ring), copy, back[i], 4096, i * 4096);
  for (int i = 0; i < 32; i++) done += finish() == 4096;
  for (int i = 0; i < 32; i++) good += !memcmp(blocks[i], back[i], 4096);
  printf("done %d good %d\n", done, good);
  io_uring_prep_fsync(io_uring_get_sqe(&ring), copy, 0);
  printf("fsync %d\n", finish());
  io_uring_prep_unlinkat(io_uring_get_sqe(&ring), AT_FDCWD, "after", 0);
  printf("unlink %d there %d\n", finish(), access("after", F_OK));
  io_uring_queue_exit(&ring);
  printf("write %d\n", (int)write(copy, "end", 3));
  show("copy", -1);
  return 0;
}

/* corbel.h: the C library of Corbel, a replicated POSIX file system.
 *
 * A program that links libcorbel reaches a volume without a mount and without system calls on
 * its reads and writes. Calls have the names, arguments and errno of their POSIX namesakes, with
 * the prefix corbel_ and a volume where the system has a process-wide root. Descriptors are the
 * library's own (small numbers from 0 per volume); they are not the kernel's. All calls are
 * thread-safe. After fork() the child must connect for itself.
 *
 * Copyright The Corbel authors. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CORBEL_H
#define CORBEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct corbel corbel_t;

/* Attaches to the node whose socket is `socket` (as printed by `corbel status`). NULL and errno
 * on failure: ECONNREFUSED or ENOENT when no node runs there. */
corbel_t *corbel_connect(const char *socket);
void corbel_disconnect(corbel_t *fs);

int corbel_open(corbel_t *fs, const char *path, int flags, mode_t mode);
int corbel_close(corbel_t *fs, int fd);
ssize_t corbel_read(corbel_t *fs, int fd, void *buf, size_t len);
ssize_t corbel_write(corbel_t *fs, int fd, const void *buf, size_t len);
ssize_t corbel_pread(corbel_t *fs, int fd, void *buf, size_t len, off_t offset);
ssize_t corbel_pwrite(corbel_t *fs, int fd, const void *buf, size_t len, off_t offset);
off_t corbel_lseek(corbel_t *fs, int fd, off_t offset, int whence);
/* Returns when every replica holds what was written to the file. */
int corbel_fsync(corbel_t *fs, int fd);
int corbel_fdatasync(corbel_t *fs, int fd);
/* The same for everything that this connection did. */
int corbel_sync(corbel_t *fs);
int corbel_ftruncate(corbel_t *fs, int fd, off_t size);
int corbel_truncate(corbel_t *fs, const char *path, off_t size);
int corbel_fallocate(corbel_t *fs, int fd, int mode, off_t offset, off_t len);

int corbel_stat(corbel_t *fs, const char *path, struct stat *st);
int corbel_lstat(corbel_t *fs, const char *path, struct stat *st);
int corbel_fstat(corbel_t *fs, int fd, struct stat *st);
int corbel_access(corbel_t *fs, const char *path, int mode);
int corbel_chmod(corbel_t *fs, const char *path, mode_t mode);
int corbel_chown(corbel_t *fs, const char *path, uid_t uid, gid_t gid);
int corbel_lchown(corbel_t *fs, const char *path, uid_t uid, gid_t gid);
int corbel_utimens(corbel_t *fs, const char *path, const struct timespec times[2]);
int corbel_statvfs(corbel_t *fs, struct statvfs *st);

int corbel_mkdir(corbel_t *fs, const char *path, mode_t mode);
int corbel_mknod(corbel_t *fs, const char *path, mode_t mode, dev_t dev);
int corbel_rmdir(corbel_t *fs, const char *path);
int corbel_unlink(corbel_t *fs, const char *path);
int corbel_rename(corbel_t *fs, const char *from, const char *to);
int corbel_renameat2(corbel_t *fs, const char *from, const char *to, unsigned flags);
int corbel_link(corbel_t *fs, const char *from, const char *to);
int corbel_symlink(corbel_t *fs, const char *target, const char *path);
ssize_t corbel_readlink(corbel_t *fs, const char *path, char *buf, size_t len);

/* Calls `each` with every entry of the directory until it returns other than 0, and returns that
 * (or 0 at the end, or -1 and errno). `type` is as in struct dirent's d_type. */
int corbel_readdir(corbel_t *fs, const char *path,
                   int (*each)(void *context, const char *name, uint64_t ino, int type),
                   void *context);

ssize_t corbel_getxattr(corbel_t *fs, const char *path, const char *name, void *value, size_t len);
ssize_t corbel_listxattr(corbel_t *fs, const char *path, char *list, size_t len);
int corbel_setxattr(corbel_t *fs, const char *path, const char *name, const void *value,
                    size_t len, int flags);
int corbel_removexattr(corbel_t *fs, const char *path, const char *name);

#ifdef __cplusplus
}
#endif
#endif

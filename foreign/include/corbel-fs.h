/* corbel-fs.h: a file system in C behind Corbel's front ends: virtio-fs devices, FUSE mounts, DPUs.
 *
 * A back end is a shared library that exports corbel_fs_open. It needs this header and links to nothing:
 *
 *     cc -shared -fPIC -o mine.so mine.c
 *     corbel virtiofs --backend lib --source ./mine.so#argument --socket-path /run/vm1.fs
 *     corbel mount 'lib:./mine.so#argument' /mnt
 *
 * Every operation gets a request and answers it exactly once (a second answer would be of memory that is gone), by one of the
 * corbel_fs_reply functions, from any thread, during the call or any time after it. The request is gone with that. Reads, writes and syncs that are answered later hold no thread meanwhile; of other
 * operations a thread of the front end waits. Operations come from many threads at once. What they are given (names, callers, data)
 * is there during the call only, the data of a write until it is answered.
 *
 * A handle is released when nothing that was begun with it waits any more. Cookies of readdir are a guest's, and any number.
 *
 * Inode numbers are the back end's own, from 1 (the root) to 2^63 - 1. A number leads to its inode as long as that has a name or is open.
 * Permissions: a kernel checks modes for its processes; a back end that does not trust the kernel of a guest checks the caller itself.
 * Locks of files are kept by each kernel for its own processes.
 *
 * Copyright The Corbel authors. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CORBEL_FS_H
#define CORBEL_FS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CORBEL_FS_ROOT 1u

struct corbel_fs_time {
    int64_t sec;   /* seconds since 1970 */
    uint32_t nsec; /* below 1,000,000,000 */
    uint32_t reserved;
};

/* Attributes, as stat(2) has them. */
struct corbel_fs_attr {
    uint64_t ino;
    uint64_t size;
    uint64_t blocks; /* of 512 bytes */
    struct corbel_fs_time atime, mtime, ctime, btime;
    uint32_t mode; /* with the type: S_IFREG, S_IFDIR ... */
    uint32_t nlink;
    uint32_t uid;
    uint32_t gid;
    uint32_t rdev; /* of a special file */
    uint32_t reserved;
};

/* Whose process asks. */
struct corbel_fs_caller {
    uint32_t uid;
    uint32_t gid;
    uint32_t pid;   /* 0: not known here */
    uint32_t umask; /* to be taken off the mode of what is made */
    const uint32_t *groups;
    size_t groups_count;
};

/* What setattr shall change. */
#define CORBEL_FS_SET_MODE 1u
#define CORBEL_FS_SET_UID 2u
#define CORBEL_FS_SET_GID 4u
#define CORBEL_FS_SET_SIZE 8u
#define CORBEL_FS_SET_ATIME 16u
#define CORBEL_FS_SET_MTIME 32u
#define CORBEL_FS_SET_ATIME_NOW 64u
#define CORBEL_FS_SET_MTIME_NOW 128u

struct corbel_fs_set {
    uint32_t what; /* CORBEL_FS_SET_... */
    uint32_t mode; /* permission bits */
    uint32_t uid;
    uint32_t gid;
    uint64_t size;
    struct corbel_fs_time atime, mtime;
};

struct corbel_fs_space {
    uint32_t block_bytes; /* the unit of the next two */
    uint32_t name_max;
    uint64_t blocks, blocks_free;
    uint64_t inodes, inodes_free;
};

struct corbel_fs_replies;

/* A request that waits for its answer. */
typedef struct corbel_fs_request {
    const struct corbel_fs_replies *replies;
} corbel_fs_request_t;

/* The library's side: called through the functions below. Grows at its end only. */
struct corbel_fs_replies {
    size_t size;
    void (*done)(corbel_fs_request_t *, int error);
    void (*attr)(corbel_fs_request_t *, const struct corbel_fs_attr *);
    void (*open)(corbel_fs_request_t *, const struct corbel_fs_attr *, uint64_t handle);
    void (*data)(corbel_fs_request_t *, const void *, size_t);
    void (*written)(corbel_fs_request_t *, size_t, uint64_t offset);
    void (*space)(corbel_fs_request_t *, const struct corbel_fs_space *);
    void (*offset)(corbel_fs_request_t *, uint64_t);
    int (*entry)(corbel_fs_request_t *, const char *name, uint64_t ino, uint32_t mode, uint64_t next);
};

/* It failed, by a number of <errno.h>; or, with 0, it is done, where nothing else is answered. */
static inline void corbel_fs_reply_done(corbel_fs_request_t *r, int error) { r->replies->done(r, error); }
/* Attributes: of lookup, getattr, fgetattr, setattr, mknod, link. */
static inline void corbel_fs_reply_attr(corbel_fs_request_t *r, const struct corbel_fs_attr *attr) { r->replies->attr(r, attr); }
/* A handle of an open file: of open (attr: NULL) and create. */
static inline void corbel_fs_reply_open(corbel_fs_request_t *r, const struct corbel_fs_attr *attr, uint64_t handle) {
    r->replies->open(r, attr, handle);
}
/* Bytes: of read (fewer than asked: the end of the file), readlink, getxattr, listxattr (each name ended by NUL). They are copied. */
static inline void corbel_fs_reply_data(corbel_fs_request_t *r, const void *data, size_t len) { r->replies->data(r, data, len); }
/* So many bytes were written, and where. */
static inline void corbel_fs_reply_written(corbel_fs_request_t *r, size_t len, uint64_t offset) { r->replies->written(r, len, offset); }
/* Of statfs. */
static inline void corbel_fs_reply_space(corbel_fs_request_t *r, const struct corbel_fs_space *space) { r->replies->space(r, space); }
/* Of lseek. */
static inline void corbel_fs_reply_offset(corbel_fs_request_t *r, uint64_t offset) { r->replies->offset(r, offset); }
/* One name of readdir, of whose mode the type counts. `next` is where to go on behind it: never 0, below 2^62, and good also after names came
 * and went. The names "." and ".." are not reported. 0: no more fit. The request is answered by corbel_fs_reply_done in any case; if
 * that comes without any entry, the directory has ended. */
static inline int corbel_fs_reply_entry(corbel_fs_request_t *r, const char *name, uint64_t ino, uint32_t mode, uint64_t next) {
    return r->replies->entry(r, name, ino, mode, next);
}

/* The back end's side. Grows at its end only; what is NULL is answered by ENOSYS (extended attributes and fallocate: EOPNOTSUPP), `release` and `close` by
 * nothing. A kernel that is told ENOSYS for fsync takes it that nothing need be done, and does not ask again. Errors are those of the system calls. */
struct corbel_fs_operations {
    size_t size; /* sizeof(struct corbel_fs_operations) */
    void (*lookup)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t parent, const char *name);
    void (*getattr)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino);
    void (*setattr)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, const struct corbel_fs_set *);
    void (*readlink)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino);
    /* A file, directory, special file or (with a target, else NULL) symbolic link. */
    void (*mknod)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t parent, const char *name, uint32_t mode,
                  uint32_t rdev, const char *target);
    void (*unlink)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t parent, const char *name);
    void (*rmdir)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t parent, const char *name);
    /* flags: those of renameat2. */
    void (*rename)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t parent, const char *name,
                   uint64_t new_parent, const char *new_name, uint32_t flags);
    void (*link)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, uint64_t parent, const char *name);
    /* flags: access mode, O_TRUNC, O_DSYNC (which writes append each says itself); of create O_EXCL too, without which it opens what is there. */
    void (*open)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, uint32_t flags);
    void (*create)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t parent, const char *name, uint32_t mode,
                   uint32_t flags);
    void (*read)(void *fs, corbel_fs_request_t *, uint64_t handle, uint64_t offset, size_t len);
    /* append: to the end, wherever that is. */
    void (*write)(void *fs, corbel_fs_request_t *, uint64_t handle, uint64_t offset, const void *data, size_t len, int append);
    void (*fsync)(void *fs, corbel_fs_request_t *, uint64_t handle, int data_only);
    /* Of a directory; of the root: everything. */
    void (*fsync_inode)(void *fs, corbel_fs_request_t *, uint64_t ino);
    /* mode: FALLOC_FL_... */
    void (*fallocate)(void *fs, corbel_fs_request_t *, uint64_t handle, uint32_t mode, uint64_t offset, uint64_t len);
    /* whence: SEEK_DATA or SEEK_HOLE. */
    void (*lseek)(void *fs, corbel_fs_request_t *, uint64_t handle, uint64_t offset, int whence);
    void (*fgetattr)(void *fs, corbel_fs_request_t *, uint64_t handle);
    void (*release)(void *fs, uint64_t handle);
    /* Names behind `cookie` (0: from the first one). */
    void (*readdir)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, uint64_t cookie);
    void (*statfs)(void *fs, corbel_fs_request_t *, uint64_t ino);
    void (*getxattr)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, const char *name);
    void (*listxattr)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino);
    /* flags: XATTR_CREATE, XATTR_REPLACE. */
    void (*setxattr)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, const char *name, const void *value,
                     size_t len, int flags);
    void (*removexattr)(void *fs, corbel_fs_request_t *, const struct corbel_fs_caller *, uint64_t ino, const char *name);
    /* The end: no request waits any more. */
    void (*close)(void *fs);
};

/* What a back end exports: opens the file system that `argument` names (what stands behind '#', or ""), and gives its operations, which stay
 * as they are, and what each of them gets. 0, or an errno. */
int corbel_fs_open(const char *argument, const struct corbel_fs_operations **operations, void **fs);

#ifdef __cplusplus
}
#endif
#endif

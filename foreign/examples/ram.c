/* A back end in one page: files in memory, in one directory. Syncs are answered later, by another thread, as those of a server elsewhere
 * would be. The argument is how many files there may be.
 *
 *     cc -shared -fPIC -pthread -o ram.so ram.c -I../include
 */
#include <corbel-fs.h>

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES_MAX 4096
#define BYTES_MAX (64u << 20)

struct file {
    char name[256]; /* "": it has none any more */
    char *data;
    size_t opened;
    struct corbel_fs_attr attr; /* ino 0: there is no such file */
};
struct ram {
    pthread_mutex_t lock;
    size_t files_max;
    struct corbel_fs_attr root;
    struct file files[FILES_MAX]; /* inode N is files[N - 2] */
};

static struct file *by_name(struct ram *ram, const char *name) {
    for (size_t i = 0; i < ram->files_max; i++)
        if (ram->files[i].attr.ino && strcmp(ram->files[i].name, name) == 0) return &ram->files[i];
    return NULL;
}
static struct file *by_number(struct ram *ram, uint64_t ino) {
    return ino >= 2 && ino - 2 < ram->files_max && ram->files[ino - 2].attr.ino ? &ram->files[ino - 2] : NULL;
}
static void drop_unused(struct file *file) {
    if (file->name[0] || file->opened) return;
    free(file->data);
    memset(file, 0, sizeof *file);
}
static int resize(struct file *file, uint64_t size) {
    if (size > BYTES_MAX) return EFBIG;
    if (size > file->attr.size) {
        char *data = realloc(file->data, size);
        if (!data) return ENOSPC;
        file->data = data;
        memset(data + file->attr.size, 0, size - file->attr.size);
    }
    file->attr.size = size;
    file->attr.blocks = (size + 511) / 512;
    return 0;
}

#define BEGIN(fs) struct ram *ram = fs; pthread_mutex_lock(&ram->lock)
#define END(reply) do { reply; pthread_mutex_unlock(&ram->lock); return; } while (0)
#define FAIL(error) END(corbel_fs_reply_done(r, error))

static void ram_lookup(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t parent, const char *name) {
    (void)c, (void)parent;
    BEGIN(fs);
    struct file *file = by_name(ram, name);
    if (!file) FAIL(ENOENT);
    END(corbel_fs_reply_attr(r, &file->attr));
}
static void ram_getattr(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t ino) {
    (void)c;
    BEGIN(fs);
    struct file *file = by_number(ram, ino);
    if (ino != CORBEL_FS_ROOT && !file) FAIL(ESTALE);
    END(corbel_fs_reply_attr(r, file ? &file->attr : &ram->root));
}
static void ram_setattr(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t ino, const struct corbel_fs_set *set) {
    (void)c;
    BEGIN(fs);
    struct file *file = by_number(ram, ino);
    struct corbel_fs_attr *attr = file ? &file->attr : &ram->root;
    if (ino != CORBEL_FS_ROOT && !file) FAIL(ESTALE);
    if (set->what & CORBEL_FS_SET_SIZE) {
        int error = file ? resize(file, set->size) : EISDIR;
        if (error) FAIL(error);
    }
    if (set->what & CORBEL_FS_SET_MODE) attr->mode = (attr->mode & S_IFMT) | set->mode;
    if (set->what & CORBEL_FS_SET_UID) attr->uid = set->uid;
    if (set->what & CORBEL_FS_SET_GID) attr->gid = set->gid;
    if (set->what & CORBEL_FS_SET_MTIME) attr->mtime = set->mtime;
    END(corbel_fs_reply_attr(r, attr));
}
static void ram_create(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t parent, const char *name, uint32_t mode,
                       uint32_t flags) {
    (void)parent;
    BEGIN(fs);
    struct file *there = by_name(ram, name);
    if (there) {
        if (flags & 0200 /* O_EXCL */) FAIL(EEXIST);
        if (flags & 01000 /* O_TRUNC */) resize(there, 0);
        there->opened++;
        END(corbel_fs_reply_open(r, &there->attr, there->attr.ino));
    }
    for (size_t i = 0; i < ram->files_max; i++) {
        struct file *file = &ram->files[i];
        if (file->attr.ino) continue;
        file->attr = (struct corbel_fs_attr){.ino = i + 2, .mode = S_IFREG | (mode & ~c->umask), .nlink = 1, .uid = c->uid, .gid = c->gid};
        strcpy(file->name, name); /* at most 255 bytes */
        file->opened = 1;
        END(corbel_fs_reply_open(r, &file->attr, file->attr.ino));
    }
    FAIL(ENOSPC);
}
static void ram_unlink(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t parent, const char *name) {
    (void)c, (void)parent;
    BEGIN(fs);
    struct file *file = by_name(ram, name);
    if (!file) FAIL(ENOENT);
    file->name[0] = 0, file->attr.nlink = 0;
    drop_unused(file);
    FAIL(0);
}
static void ram_rename(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t parent, const char *name,
                       uint64_t new_parent, const char *new_name, uint32_t flags) {
    (void)c, (void)parent, (void)new_parent;
    BEGIN(fs);
    struct file *file = by_name(ram, name), *old = by_name(ram, new_name);
    if (!file) FAIL(ENOENT);
    if (flags) FAIL(EINVAL);
    if (old == file) FAIL(0);
    if (old) old->name[0] = 0, old->attr.nlink = 0, drop_unused(old);
    strcpy(file->name, new_name);
    FAIL(0);
}
static void ram_open(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t ino, uint32_t flags) {
    (void)c;
    BEGIN(fs);
    struct file *file = by_number(ram, ino);
    if (!file) FAIL(ino == CORBEL_FS_ROOT ? EISDIR : ESTALE);
    if (flags & 01000 /* O_TRUNC */) resize(file, 0); /* which makes it no longer, so it does not fail */
    file->opened++;
    END(corbel_fs_reply_open(r, NULL, ino));
}
static void ram_release(void *fs, uint64_t handle) {
    BEGIN(fs);
    struct file *file = by_number(ram, handle);
    if (file) file->opened--, drop_unused(file);
    pthread_mutex_unlock(&ram->lock);
}
static void ram_read(void *fs, corbel_fs_request_t *r, uint64_t handle, uint64_t offset, size_t len) {
    BEGIN(fs);
    struct file *file = by_number(ram, handle);
    if (!file) FAIL(EBADF);
    uint64_t left = offset < file->attr.size ? file->attr.size - offset : 0;
    END(corbel_fs_reply_data(r, left ? file->data + offset : NULL, len < left ? len : left));
}
static void ram_write(void *fs, corbel_fs_request_t *r, uint64_t handle, uint64_t offset, const void *data, size_t len, int append) {
    BEGIN(fs);
    struct file *file = by_number(ram, handle);
    if (!file) FAIL(EBADF);
    if (append) offset = file->attr.size;
    if (len == 0) END(corbel_fs_reply_written(r, 0, offset));
    if (offset > BYTES_MAX) FAIL(EFBIG);
    int error = offset + len > file->attr.size ? resize(file, offset + len) : 0;
    if (error) FAIL(error);
    memcpy(file->data + offset, data, len);
    END(corbel_fs_reply_written(r, len, offset));
}
static void ram_fgetattr(void *fs, corbel_fs_request_t *r, uint64_t handle) { ram_getattr(fs, r, NULL, handle); }
static void ram_readdir(void *fs, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t ino, uint64_t cookie) {
    (void)c, (void)ino;
    BEGIN(fs);
    for (size_t i = cookie; i < ram->files_max; i++) {
        struct file *file = &ram->files[i];
        if (file->name[0] && !corbel_fs_reply_entry(r, file->name, file->attr.ino, file->attr.mode, i + 1)) break;
    }
    FAIL(0);
}
static void ram_statfs(void *fs, corbel_fs_request_t *r, uint64_t ino) {
    (void)ino;
    struct corbel_fs_space space = {.block_bytes = 4096, .name_max = 255};
    space.inodes = ((struct ram *)fs)->files_max;
    corbel_fs_reply_space(r, &space);
}
static void *answer(void *r) {
    usleep(1000);
    corbel_fs_reply_done(r, 0);
    return NULL;
}
static void ram_fsync(void *fs, corbel_fs_request_t *r, uint64_t handle, int data_only) {
    pthread_t thread;
    (void)fs, (void)handle, (void)data_only;
    if (pthread_create(&thread, NULL, answer, r) == 0) pthread_detach(thread);
    else corbel_fs_reply_done(r, EAGAIN);
}
static void ram_fsync_inode(void *fs, corbel_fs_request_t *r, uint64_t ino) { ram_fsync(fs, r, ino, 0); }
static void ram_close(void *fs) {
    struct ram *ram = fs;
    for (size_t i = 0; i < FILES_MAX; i++) free(ram->files[i].data);
    pthread_mutex_destroy(&ram->lock);
    free(ram);
}

static const struct corbel_fs_operations operations = {
    .size = sizeof operations, .lookup = ram_lookup, .getattr = ram_getattr, .setattr = ram_setattr, .create = ram_create,
    .unlink = ram_unlink, .rename = ram_rename, .open = ram_open, .release = ram_release, .read = ram_read, .write = ram_write,
    .fgetattr = ram_fgetattr, .readdir = ram_readdir, .statfs = ram_statfs, .fsync = ram_fsync, .fsync_inode = ram_fsync_inode,
    .close = ram_close,
};

int corbel_fs_open(const char *argument, const struct corbel_fs_operations **ops, void **fs) {
    size_t files = argument[0] ? strtoul(argument, NULL, 10) : FILES_MAX;
    if (files == 0 || files > FILES_MAX) return EINVAL;
    struct ram *ram = calloc(1, sizeof *ram);
    if (!ram) return ENOMEM;
    pthread_mutex_init(&ram->lock, NULL);
    ram->files_max = files;
    ram->root = (struct corbel_fs_attr){.ino = CORBEL_FS_ROOT, .mode = S_IFDIR | 01777, .nlink = 2};
    *ops = &operations;
    *fs = ram;
    return 0;
}

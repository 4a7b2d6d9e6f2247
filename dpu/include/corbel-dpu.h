/* corbel-dpu.h: a file-system device for the emulation layer of a DPU, or of anything else that has a guest's queues.
 *
 * Whoever emulates the virtio-fs device towards the host (SNAP, an SPDK fsdev module, a monitor of its own) takes FUSE requests
 * from its queues as scatter lists and hands them in; each is completed later, by a thread of the library. The device keeps its
 * tenant in the directory that it was given, and checks every request.
 *
 * All calls are thread-safe. Copyright The Corbel authors. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CORBEL_DPU_H
#define CORBEL_DPU_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows at its end only; `size` says how much of it there is. What is 0 or NULL has its default. */
struct corbel_dpu_options {
    size_t size;           /* sizeof(struct corbel_dpu_options) */
    const char *source;    /* socket of the node, or a back end: "dir:/PATH", "nfs://HOST/EXPORT", "kv:HOST:PORT#NAME",
                              "lib:/PATH.so#ARGUMENT" (corbel-fs.h), "null:" */
    const char *directory; /* the directory of the volume that the guest gets ("/") */
    const char *tenant;    /* whose it is, for logs ("guest") */
    uint32_t queues;       /* request queues, 1 to 64 (1) */
    uint32_t threads;      /* threads of each (2) */
    uint64_t iops;         /* operations a second at most (0: no limit) */
    uint64_t bandwidth;    /* bytes a second at most (0: no limit) */
    uint32_t readonly;     /* not 0: nothing may be changed */
    uint64_t iops_burst;   /* operations that may come at once (a tenth of a second's) */
    uint64_t bandwidth_burst;  /* bytes of them (the same) */
    const char *translate_uid; /* users of guest and host, "map:GUEST:HOST:COUNT" and the other forms of `corbel virtiofs`, by commas (as they are) */
    const char *translate_gid; /* groups */
    uint64_t nodes_max;    /* inodes that the guest may know at once (1,048,576) */
    uint64_t handles_max;  /* files that it may have open (65,536) */
    uint32_t weight;       /* share of the processors beside the other devices of the process that have one (0: is not held back for others) */
    uint32_t xattr;        /* not 0: there are extended attributes */
    uint32_t posix_acl;    /* not 0: access lists are kept, where the file system has them (with xattr, without translated users) */
    uint32_t reserved;     /* 0 */
    const char *state;     /* a file that keeps what the guest has open, so that another process can go on after this one was killed (NULL:
                              nobody can). One device at a time has it. Requests that were not completed are handed in by
                              corbel_dpu_submit_again then. */
};

typedef struct corbel_dpu corbel_dpu_t;

/* The reply is in the first `written` bytes of the request's `out`; 0 for requests that have none (FORGET). Called once for each
 * request that was taken, by any thread, perhaps before corbel_dpu_submit returns. It must not wait. */
typedef void (*corbel_dpu_done)(void *context, uint32_t written);

/* Makes a device and starts its threads. 0, or a negative errno: -EINVAL for options that mean nothing, else what the file system
 * says. */
int corbel_dpu_register(const struct corbel_dpu_options *options, corbel_dpu_t **device);

/* Hands in a request: a FUSE request in `in`, room for its reply in `out`. Queue 0 is for requests that must not wait behind others
 * (virtio-fs calls it hiprio), the others are numbered from 1. The lists are copied; the memory that they name stays there, and is the library's
 * to write, until the request is completed. Its content may change meanwhile. 0, or -EINVAL (no such queue, more than
 * some 300 pieces, a null pointer), and then it was not taken. */
int corbel_dpu_submit(corbel_dpu_t *device, uint32_t queue, const struct iovec *in, size_t in_count,
                      const struct iovec *out, size_t out_count, corbel_dpu_done done, void *context);

/* The same for a request that a process before this one had taken and not completed: it may have been done already, and is not done twice. */
int corbel_dpu_submit_again(corbel_dpu_t *device, uint32_t queue, const struct iovec *in, size_t in_count,
                            const struct iovec *out, size_t out_count, corbel_dpu_done done, void *context);

/* The guest has reset its device: files and locks are given back. Requests that wait for a lock are not completed any more. */
void corbel_dpu_reset(corbel_dpu_t *device);

/* Ends the device, after the requests that are being served, for which it waits (10 s at most). What has not begun is completed with 0 bytes. Not
 * to be called by a corbel_dpu_done. */
void corbel_dpu_unregister(corbel_dpu_t *device);

#ifdef __cplusplus
}
#endif
#endif

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
    const char *source;    /* socket of the node, "dir:/PATH" or "null:" */
    const char *directory; /* the directory of the volume that the guest gets ("/") */
    const char *tenant;    /* whose it is, for logs ("guest") */
    uint32_t queues;       /* request queues, 1 to 64 (1) */
    uint32_t threads;      /* threads of each (2) */
    uint64_t iops;         /* operations a second at most (0: no limit) */
    uint64_t bandwidth;    /* bytes a second at most (0: no limit) */
    uint32_t readonly;     /* not 0: nothing may be changed */
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

/* The guest has reset its device: files and locks are given back. Requests that wait for a lock are not completed any more. */
void corbel_dpu_reset(corbel_dpu_t *device);

/* Ends the device, after the requests that are being served. What has not begun is completed with 0 bytes. */
void corbel_dpu_unregister(corbel_dpu_t *device);

#ifdef __cplusplus
}
#endif
#endif

/* A program that knows nothing but corbel-dpu.h: INIT, MKDIR, and what is refused. The first argument is a directory. */
#include <corbel-dpu.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t came = PTHREAD_COND_INITIALIZER;
static int finished;

static void done(void *context, uint32_t written) {
    pthread_mutex_lock(&lock);
    *(uint32_t *)context = written;
    finished = 1;
    pthread_cond_signal(&came);
    pthread_mutex_unlock(&lock);
}

/* A FUSE request: opcode, node and body in two pieces; its error. */
static int call(corbel_dpu_t *device, uint32_t opcode, uint64_t node, const void *body, uint32_t len) {
    unsigned char head[40] = {0}, reply[512];
    uint32_t total = sizeof head + len, written = 0;
    int32_t error;
    memcpy(head, &total, 4);
    memcpy(head + 4, &opcode, 4);
    head[8] = 7;
    memcpy(head + 16, &node, 8);
    struct iovec in[2] = {{head, sizeof head}, {(void *)body, len}}, out[1] = {{reply, sizeof reply}};
    finished = 0;
    int taken = corbel_dpu_submit(device, 1, in, 2, out, 1, done, &written);
    if (taken != 0) return taken;
    pthread_mutex_lock(&lock);
    while (!finished) pthread_cond_wait(&came, &lock);
    pthread_mutex_unlock(&lock);
    if (written < 16) return -EPROTO;
    memcpy(&error, reply + 4, 4);
    return error;
}

#define CHECK(what) do { if (!(what)) { printf("line %d: " #what "\n", __LINE__); return 1; } } while (0)

int main(int argc, char **argv) {
    char source[4096], path[4096];
    struct stat st;
    corbel_dpu_t *device = NULL;
    struct corbel_dpu_options options = {.size = sizeof options, .source = source, .queues = 2};
    uint32_t init[16] = {7, 31, 65536, 0}, mkdir_in[3] = {0755, 0, 0};
    CHECK(argc == 2);
    snprintf(source, sizeof source, "dir:%s", argv[1]);
    CHECK(corbel_dpu_register(NULL, &device) == -EINVAL);
    options.size = 8;
    CHECK(corbel_dpu_register(&options, &device) == -EINVAL);
    options.size = sizeof options;
    CHECK(corbel_dpu_register(&options, &device) == 0);
    CHECK(call(device, 26, 0, init, 16) == 0);
    memcpy(&mkdir_in[2], "d\0", 2);
    CHECK(call(device, 9, 1, mkdir_in, 10) == 0);
    CHECK(call(device, 9, 1, mkdir_in, 10) == -EEXIST);
    CHECK(call(device, 3, 12345, init, 16) == -ESTALE);
    snprintf(path, sizeof path, "%s/d", argv[1]);
    CHECK(stat(path, &st) == 0 && S_ISDIR(st.st_mode));
    CHECK(corbel_dpu_submit(device, 9, NULL, 0, NULL, 0, done, NULL) == -EINVAL);
    CHECK(corbel_dpu_submit(device, 1, NULL, 0, NULL, 0, NULL, NULL) == -EINVAL);
    CHECK(corbel_dpu_submit(device, 1, NULL, 3, NULL, 0, done, NULL) == -EINVAL);
    corbel_dpu_reset(device);
    CHECK(call(device, 26, 0, init, 16) == 0);
    corbel_dpu_unregister(device);
    printf("fine\n");
    return 0;
}

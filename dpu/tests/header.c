/* A program that knows nothing but corbel-dpu.h: files by many threads at once, users of the guest's, what a guest may have at most, a process
 * that is killed and another one that goes on, and what is refused. The first argument is a directory. */
#include <corbel-dpu.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

struct answer {
    pthread_mutex_t lock;
    pthread_cond_t came;
    uint32_t written;
    int finished;
};

static void done(void *context, uint32_t written) {
    struct answer *answer = context;
    pthread_mutex_lock(&answer->lock);
    answer->written = written;
    answer->finished = 1;
    pthread_cond_signal(&answer->came);
    pthread_mutex_unlock(&answer->lock);
}

/* A FUSE request of user 1000: opcode, node, body and data in three pieces, and its reply in two; its error. Queue 1 or, `again`, the same as of a
 * process before this one. */
static int call_full(corbel_dpu_t *device, int queue, int again, uint32_t opcode, uint64_t node, const void *body, uint32_t len, const void *data,
                     uint32_t data_len, void *back, size_t back_len) {
    unsigned char head[40] = {0}, reply[16];
    uint32_t total = sizeof head + len + data_len, user = 1000;
    int32_t error;
    struct answer answer = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
    memcpy(head, &total, 4);
    memcpy(head + 4, &opcode, 4);
    head[8] = 7;
    memcpy(head + 16, &node, 8);
    memcpy(head + 24, &user, 4);
    memcpy(head + 28, &user, 4);
    struct iovec in[3] = {{head, sizeof head}, {(void *)body, len}, {(void *)data, data_len}};
    struct iovec out[2] = {{reply, sizeof reply}, {back, back_len}};
    int taken = (again ? corbel_dpu_submit_again : corbel_dpu_submit)(device, queue, in, 3, out, 2, done, &answer);
    if (taken != 0) return taken;
    pthread_mutex_lock(&answer.lock);
    while (!answer.finished) pthread_cond_wait(&answer.came, &answer.lock);
    pthread_mutex_unlock(&answer.lock);
    if (answer.written < 16) return -EPROTO;
    memcpy(&error, reply + 4, 4);
    return error < 0 ? error : (int)(answer.written - 16);
}

static int call(corbel_dpu_t *device, uint32_t opcode, uint64_t node, const void *body, uint32_t len) {
    unsigned char back[512];
    int answered = call_full(device, 1, 0, opcode, node, body, len, NULL, 0, back, sizeof back);
    return answered < 0 ? answered : 0;
}

/* Makes a file in the root: its node and handle. */
static int create(corbel_dpu_t *device, int queue, const char *name, uint64_t *node, uint64_t *handle) {
    unsigned char body[16 + 64] = {0}, back[128 + 16];
    uint32_t flags = 2, mode = 0644;
    memcpy(body, &flags, 4);
    memcpy(body + 4, &mode, 4);
    strcpy((char *)body + 16, name);
    int answered = call_full(device, queue, 0, 35, 1, body, 16 + strlen(name) + 1, NULL, 0, back, sizeof back);
    if (answered < 0) return answered;
    memcpy(node, back, 8);
    memcpy(handle, back + 128, 8);
    return 0;
}

static int write_at(corbel_dpu_t *device, int queue, uint64_t node, uint64_t handle, uint64_t at, const void *data, uint32_t len) {
    unsigned char body[40] = {0}, back[8];
    memcpy(body, &handle, 8);
    memcpy(body + 8, &at, 8);
    memcpy(body + 16, &len, 4);
    int answered = call_full(device, queue, 0, 16, node, body, 40, data, len, back, 8);
    return answered == 8 ? (int)(back[0] | back[1] << 8) : answered;
}

static int read_at(corbel_dpu_t *device, int queue, uint64_t node, uint64_t handle, uint64_t at, void *data, uint32_t len) {
    unsigned char body[40] = {0};
    memcpy(body, &handle, 8);
    memcpy(body + 8, &at, 8);
    memcpy(body + 16, &len, 4);
    return call_full(device, queue, 0, 15, node, body, 40, NULL, 0, data, len);
}

struct worker {
    corbel_dpu_t *device;
    int number;
    const char *failed;
};

/* One of many: writes and reads a file of its own, in a queue that it shares with others. */
static void *work(void *arg) {
    struct worker *worker = arg;
    uint64_t node, handle;
    char name[16];
    unsigned char data[3000], back[3000];
    int queue = 1 + worker->number % 2;
    snprintf(name, sizeof name, "w%d", worker->number);
    worker->failed = "create";
    if (create(worker->device, queue, name, &node, &handle) != 0) return NULL;
    for (uint64_t i = 0; i < 200; i++) {
        memset(data, (int)(i * 7 + worker->number), sizeof data);
        worker->failed = "write";
        if (write_at(worker->device, queue, node, handle, i * 1000, data, sizeof data) != sizeof data) return NULL;
        worker->failed = "read";
        if (read_at(worker->device, queue, node, handle, i * 1000, back, sizeof back) != sizeof back) return NULL;
        worker->failed = "compare";
        if (memcmp(data, back, sizeof back) != 0) return NULL;
    }
    worker->failed = NULL;
    return NULL;
}

#define CHECK(what) do { if (!(what)) { printf("line %d: " #what "\n", __LINE__); return 1; } } while (0)

int main(int argc, char **argv) {
    char source[4096], path[4096], state[4096];
    struct stat st;
    struct worker workers[8];
    pthread_t threads[8];
    uint64_t node, handle;
    unsigned char back[64];
    int error, status;
    corbel_dpu_t *device = NULL;
    struct corbel_dpu_options options = {.size = sizeof options, .source = source, .queues = 2};
    uint32_t init[16] = {7, 31, 65536, 0}, mkdir_in[3] = {0755, 0, 0};
    CHECK(argc == 2 && chmod(argv[1], 0777) == 0);
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
    for (int i = 0; i < 8; i++) {
        workers[i] = (struct worker){device, i, NULL};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(threads[i], NULL);
        if (workers[i].failed) return printf("worker %d: %s\n", i, workers[i].failed), 1;
    }
    corbel_dpu_unregister(device);

    /* An older program's options end before `iops_burst`. */
    options.size = offsetof(struct corbel_dpu_options, iops_burst);
    CHECK(corbel_dpu_register(&options, &device) == 0);
    corbel_dpu_unregister(device);
    options.size = sizeof options;

    /* Users of the guest's are others here, and it may know so many inodes. */
    options.translate_uid = "map:1000:5000:10,map:0:0:1";
    options.translate_gid = "nonsense";
    CHECK(corbel_dpu_register(&options, &device) == -EINVAL);
    options.translate_gid = "map:1000:6000:10,map:0:0:1";
    options.nodes_max = 3;
    options.handles_max = 2;
    options.weight = 4;
    options.xattr = 1;
    CHECK(corbel_dpu_register(&options, &device) == 0);
    CHECK(call(device, 26, 0, init, 16) == 0);
    CHECK(create(device, 1, "mine", &node, &handle) == 0);
    snprintf(path, sizeof path, "%s/mine", argv[1]);
    CHECK(stat(path, &st) == 0);
    if (geteuid() == 0) CHECK(st.st_uid == 5000 && st.st_gid == 6000);
    CHECK(create(device, 2, "two", &node, &handle) == 0);
    error = create(device, 1, "three", &node, &handle);
    CHECK(error == -ENFILE);
    corbel_dpu_unregister(device);
    options.translate_uid = options.translate_gid = NULL;
    options.nodes_max = options.handles_max = 0;

    /* A process that has a guest's file open dies, and another one goes on. */
    snprintf(state, sizeof state, "%s.state", argv[1]);
    options.state = state;
    int said[2];
    CHECK(pipe(said) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint64_t ids[2];
        if (corbel_dpu_register(&options, &device) != 0 || call(device, 26, 0, init, 16) != 0) _exit(1);
        if (create(device, 1, "kept", &ids[0], &ids[1]) != 0) _exit(2);
        if (write_at(device, 1, ids[0], ids[1], 0, "of the one before", 17) != 17) _exit(3);
        if (write(said[1], ids, sizeof ids) != sizeof ids) _exit(4);
        _exit(0);
    }
    uint64_t ids[2];
    CHECK(read(said[0], ids, sizeof ids) == sizeof ids);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(corbel_dpu_register(&options, &device) == 0);
    CHECK(read_at(device, 1, ids[0], ids[1], 0, back, 64) == 17);
    CHECK(memcmp(back, "of the one before", 17) == 0);
    /* What it had done without saying so is done. */
    memcpy(&mkdir_in[2], "d\0", 2);
    CHECK(call(device, 9, 1, mkdir_in, 10) == -EEXIST);
    CHECK(call_full(device, 1, 1, 9, 1, mkdir_in, 10, NULL, 0, path, 512) > 0);
    corbel_dpu_unregister(device);
    printf("fine\n");
    return 0;
}

/* Threads that write to files, at their own offsets, while others take away the last names of them. ARGV[1]: a
 * directory. Each name has bytes of its own. Says what calls have failed that must not, and what got another's bytes. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 8, ROUNDS = 1500, NAMES = 4 };
static const char *dir;
enum { LEN = 16384 };
static char data[NAMES][LEN];

static void *worker(void *n)
{
    unsigned long random = (unsigned long)n * 2654435761u + 1;
    char name[4096], back[256];
    for (int i = 0; i < ROUNDS; i++) {
        random = random * 6364136223846793005ul + 1442695040888963407ul;
        int which = (random >> 33) % NAMES;
        snprintf(name, sizeof name, "%s/%d", dir, which);
        if (random >> 62 == 0) {
            if (unlink(name) && errno != ENOENT)
                printf("unlink: %s\n", strerror(errno));
            continue;
        }
        int fd = open(name, O_CREAT | O_RDWR, 0600);
        if (fd < 0) {
            printf("open: %s\n", strerror(errno));
            continue;
        }
        if (write(fd, data[which], LEN) != LEN)
            printf("write: %s\n", strerror(errno));
        if (lseek(fd, -100, SEEK_CUR) != LEN - 100)
            printf("lseek: %s\n", strerror(errno));
        if (read(fd, back, 60) != 60)
            printf("read: %s\n", strerror(errno));
        else if (memcmp(back, data[which], 60))
            printf("file %d has bytes of another\n", which);
        close(fd);
    }
    return 0;
}

int main(int argc, char **argv)
{
    pthread_t all[THREADS];
    dir = argv[1];
    for (int i = 0; i < NAMES; i++)
        memset(data[i], 'a' + i, LEN);
    for (long i = 0; i < THREADS; i++)
        pthread_create(&all[i], 0, worker, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(all[i], 0);
    printf("done\n");
    return 0;
}

/* Threads that come and go in waves, and read a file. ARGV[1]: a directory. Says what they got wrong. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { WAVES = 150, THREADS = 40, LEN = 1 << 16, PIECE = 500 };
static char name[4096], data[LEN];

static void *worker(void *n)
{
    char back[PIECE];
    unsigned long random = (unsigned long)n * 2654435761u + 1;
    int fd = open(name, O_RDONLY);
    for (int i = 0; i < 8; i++) {
        random = random * 6364136223846793005ul + 1442695040888963407ul;
        off_t at = (random >> 33) % (LEN - PIECE);
        if (pread(fd, back, PIECE, at) != PIECE || memcmp(back, data + at, PIECE))
            printf("wrong\n");
    }
    close(fd);
    return 0;
}

int main(int argc, char **argv)
{
    pthread_t all[THREADS];
    snprintf(name, sizeof name, "%s/file", argv[1]);
    for (int i = 0; i < LEN; i++)
        data[i] = i * 7 + i / 251;
    int fd = open(name, O_CREAT | O_RDWR, 0600);
    if (write(fd, data, LEN) != LEN)
        printf("not written\n");
    for (long wave = 0; wave < WAVES; wave++) {
        for (long i = 0; i < THREADS; i++)
            pthread_create(&all[i], 0, worker, (void *)(wave * THREADS + i));
        for (int i = 0; i < THREADS; i++)
            pthread_join(all[i], 0);
    }
    printf("done\n");
    return 0;
}

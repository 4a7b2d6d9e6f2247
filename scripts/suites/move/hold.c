/* hold FILE flock|record WORD: locks it, however long that takes, says WORD, and keeps it. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
    struct flock record = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 5};
    int done = strcmp(argv[2], "flock") == 0 ? flock(fd, LOCK_EX) : fcntl(fd, F_SETLKW, &record);
    printf(done == 0 ? "guest: ok %s\n" : "guest: FAILED %s\n", argv[3]);
    fflush(stdout);
    for (;;)
        pause();
}

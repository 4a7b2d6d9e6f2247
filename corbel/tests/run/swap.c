/* A program that cannot be hooked: puts a memfd of its own where the patched text of `corbel run` was, and
 * executes ARGV[1]. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char link[300], to[300];
    int found = 0;
    DIR *dir = opendir("/proc/self/fd");
    for (struct dirent *e; dir && (e = readdir(dir));) {
        snprintf(link, sizeof link, "/proc/self/fd/%s", e->d_name);
        ssize_t n = readlink(link, to, sizeof to - 1);
        to[n < 0 ? 0 : n] = 0;
        if (strstr(to, "memfd:corbel-text")) {
            int fd = memfd_create("other", MFD_ALLOW_SEALING);
            if (ftruncate(fd, 4 << 20) || fcntl(fd, F_ADD_SEALS, 15) || dup2(fd, atoi(e->d_name)) < 0)
                return 4;
            found++;
            break;
        }
    }
    if (!found)
        return 3;
    execv(argv[1], argv + 1);
    return 5;
}

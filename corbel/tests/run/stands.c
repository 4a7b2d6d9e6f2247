// How many descriptors more a process has when it has gone to a directory by a descriptor that came with it.
#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

static int numbers(void) {
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

int main(void) {
    int before = numbers(), gone = fchdir(3);
    printf("%d %d\n", gone, numbers() - before);
    return 0;
}

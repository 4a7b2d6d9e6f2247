/* A program that cannot be hooked: echo TEXT, cat, head (one line, read byte by byte). */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char buf[4096], ch;
    ssize_t n;
    if (argc > 2 && !strcmp(argv[1], "echo")) {
        dprintf(1, "%s\n", argv[2]);
    } else if (argc > 1 && !strcmp(argv[1], "cat")) {
        while ((n = read(0, buf, sizeof buf)) > 0)
            if (write(1, buf, n) != n)
                return 1;
        return n < 0;
    } else {
        while (read(0, &ch, 1) == 1 && write(1, &ch, 1) == 1 && ch != '\n')
            ;
    }
    return 0;
}

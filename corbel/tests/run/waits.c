// Waiting for what never comes of a file, and for something else beside it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t came;
static void count(int signal) { came++; }

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// Runs in a child: something to read in 200 ms, or a signal.
static void later(int fd, int signal) {
    pid_t parent = getpid();
    if (!fork()) {
        usleep(200000);
        if (signal)
            kill(parent, signal);
        else
            write(fd, "x", 1);
        _exit(0);
    }
}

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IONBF, 0);
    chdir(argv[1]);
    int ends[2], file = open("file", O_RDWR | O_CREAT, 0644);
    char byte;
    pipe(ends);
    signal(SIGCHLD, SIG_IGN);
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, 0);

    for (int events = 0; events < 2; events++) {
        struct pollfd list[2] = {{file, events ? POLLPRI | POLLRDBAND : 0}, {ends[0], POLLIN}};
        long begun = now();
        later(ends[1], 0);
        int ret = poll(list, 2, -1);
        printf("poll %d: %d waited %d, %x %x\n", events, ret, now() - begun >= 150, list[0].revents, list[1].revents);
        read(ends[0], &byte, 1);
        begun = now();
        ret = poll(list, 2, 100);
        printf("poll %d: %d waited %d\n", events, ret, now() - begun >= 90);
    }
    struct pollfd both[2] = {{file, POLLIN | POLLPRI}, {ends[0], POLLIN}};
    int ret = poll(both, 2, -1);
    printf("ready %d %x\n", ret, both[0].revents);
    both[0].events = POLLPRI;
    later(0, SIGUSR1);
    ret = poll(both, 2, -1);
    printf("interrupted %d %d came %d\n", ret, errno, came);

    // What is blocked else comes in, and has been handled when the call is over.
    sigset_t set, none;
    sigemptyset(&none);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, 0);
    came = 0;
    later(0, SIGUSR1);
    ret = ppoll(both, 2, 0, &none);
    printf("ppoll %d %d came %d\n", ret, errno, came);
    raise(SIGUSR1);
    ret = ppoll(both, 2, 0, &none);
    printf("ppoll, there before: %d %d came %d\n", ret, errno, came);
    sigset_t is;
    sigprocmask(0, 0, &is);
    printf("still blocked %d\n", sigismember(&is, SIGUSR1));

    fd_set read_set, other;
    for (int how = 0; how < 3; how++) {
        FD_ZERO(&read_set);
        FD_ZERO(&other);
        FD_SET(ends[0], &read_set);
        FD_SET(file, &other);
        long begun = now();
        came = 0;
        if (how < 2)
            later(ends[1], how == 1 ? SIGUSR1 : 0);
        struct timeval limit = {0, 100000};
        if (how == 2)
            ret = select(ends[0] + file + 1, &read_set, 0, &other, &limit);
        else
            ret = pselect(ends[0] + file + 1, &read_set, 0, &other, 0, &none);
        printf("select %d: %d %d waited %d came %d, %d %d\n", how, ret, ret < 0 ? errno : 0, now() - begun >= 90, came,
               FD_ISSET(ends[0], &read_set) != 0, FD_ISSET(file, &other) != 0);
        if (how == 0)
            read(ends[0], &byte, 1);
    }
    return 0;
}

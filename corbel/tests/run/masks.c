// Signals that come while processes and programs are made: nothing is blocked afterwards that was not, none is
// lost, and none is delivered to who did not get it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t came, mine;
static void count(int signal) { came++; }

static void every(int microseconds) {
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &timer, 0);
}

// Whether any signal is blocked.
static int blocked(void) {
    sigset_t set;
    sigprocmask(0, 0, &set);
    for (int i = 1; i < 65; i++)
        if (sigismember(&set, i) == 1)
            return i;
    return 0;
}

// The mask of a program that is started while children end: its handler is a SIGCHLD's, which a program ignores by itself.
static void execs(char **argv) {
    int wrong = 0;
    for (int round = 0; round < 60; round++) {
        int ends[2];
        pipe(ends);
        pid_t pid = fork();
        if (!pid) {
            dup2(ends[1], 1);
            struct sigaction action = {.sa_handler = count};
            sigaction(SIGCHLD, &action, 0);
            for (int i = 0; i < 6; i++)
                if (!fork()) {
                    usleep(i * 150);
                    _exit(0);
                }
            usleep(round % 20 * 30);
            execl(argv[0], argv[0], argv[1], "blocked", (char *)0);
            _exit(9);
        }
        close(ends[1]);
        char text[64] = "";
        read(ends[0], text, sizeof text - 1);
        close(ends[0]);
        wrong += strcmp(text, "blocked 0\n") != 0;
        waitpid(pid, 0, 0);
    }
    printf("programs with another mask %d\n", wrong);
}

int main(int argc, char **argv) {
    if (argc > 2) {
        printf("blocked %d\n", blocked());
        return 0;
    }
    setvbuf(stdout, 0, _IONBF, 0);
    chdir(argv[1]);
    for (int i = 0; i < 40; i++) {
        char name[16];
        sprintf(name, "%d", i);
        open(name, O_RDWR | O_CREAT, 0644);
    }
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    int other = 0, status;
    every(50);
    for (int round = 0; round < 400; round++) {
        pid_t pid = vfork();
        if (!pid)
            _exit(blocked());
        waitpid(pid, &status, 0);
        other += status != 0;
        int is = blocked();
        if (is) {
            printf("round %d: %d is blocked behind a vfork\n", round, is);
            sigset_t none;
            sigemptyset(&none);
            sigprocmask(SIG_SETMASK, &none, 0);
        }
    }
    every(0);
    printf("vfork: children with another mask %d, signals %d\n", other, came > 0);
    // A child of fork has no timer, and no signal that its parent has got.
    other = 0;
    for (int round = 0; round < 200; round++) {
        every(400);
        came = 0;
        pid_t pid = fork();
        if (!pid) {
            // What came before, in the parent, is not counted for the child.
            int before = came;
            usleep(1000);
            _exit(came != before || blocked());
        }
        every(0);
        waitpid(pid, &status, 0);
        other += status != 0;
    }
    printf("fork: children with another's signals %d\n", other);
    execs(argv);
    return 0;
}

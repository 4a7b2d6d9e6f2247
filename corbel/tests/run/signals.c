// Signals that come while a call is being served, to handlers of every kind: none is lost, and what came along with it is what
// was sent. argv[1]: a directory on the file system to be looked at.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIGNALS 300
#define ONCE 40
#define SECONDS 60

static volatile int *seen;
static volatile int *odd;

static void plain(int signal) {
    seen[0]++;
}

static void with_info(int signal, siginfo_t *info, void *context) {
    if (info->si_signo != SIGUSR2 || info->si_code != SI_QUEUE || info->si_pid != getppid() || info->si_value.sival_int != seen[0]) odd[0]++;
    seen[0]++;
}

static void last(int signal) {
    _exit(7);
}

// Calls of many depths, so that what is left on the stacks differs.
static void work(void) {
    char name[32], bytes[3000];
    memset(bytes, 0x5a, sizeof bytes);
    for (unsigned i = 0;; i++) {
        sprintf(name, "%d.%d", getpid(), i % 7);
        int fd = open(name, O_RDWR | O_CREAT, 0600);
        pwrite(fd, bytes, sizeof bytes, i % 5000);
        pread(fd, bytes, sizeof bytes, i % 3000);
        if (i % 3 == 0) rename(name, "other"), unlink("other");
        if (i % 5 == 0) unlink(name);
        if (i % 11 == 0) fsync(fd);
        close(fd);
    }
}

static pid_t start(int signal, void *handler, int flags) {
    seen[1] = 0;
    pid_t child = fork();
    if (child) {
        while (!seen[1]) usleep(100);
        return child;
    }
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    sigaction(signal, &action, NULL);
    seen[1] = 1;
    work();
    return 0;
}

// Each is waited for before the next: two that are pending at once may become one.
static void each(const char *what, int signal, void *handler, int flags) {
    int sent = 0;
    seen[0] = odd[0] = 0;
    pid_t child = start(signal, handler, flags);
    for (; sent < SIGNALS; sent++) {
        union sigval value = {.sival_int = sent};
        if (flags & SA_SIGINFO) sigqueue(child, signal, value);
        else kill(child, signal);
        for (int i = 0; seen[0] == sent && i < SECONDS * 10000; i++) usleep(100);
        if (seen[0] == sent) break;
        usleep(sent * 37 % 1000);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    printf("%s: sent %d, seen %d, odd %d\n", what, sent, seen[0], odd[0]);
}

static void once(const char *what, int flags) {
    int ran = 0;
    for (int i = 0; i < ONCE; i++) {
        int status = 0;
        pid_t child = start(SIGTERM, last, flags);
        usleep(i * 131 % 3000);
        kill(child, SIGTERM);
        for (int j = 0; j < SECONDS * 10000 && waitpid(child, &status, WNOHANG) == 0; j++) usleep(100);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 7) ran++;
        else kill(child, SIGKILL), waitpid(child, &status, 0);
    }
    printf("%s: %d\n", what, ran);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    if (chdir(argv[1])) return 1;
    seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    odd = seen + 16;
    puts("begin");
    each("plain", SIGUSR1, plain, 0);
    each("restarting", SIGUSR1, plain, SA_RESTART);
    each("not blocked", SIGUSR1, plain, SA_NODEFER);
    each("with info", SIGUSR2, with_info, SA_SIGINFO);
    once("the last", 0);
    once("once", SA_RESETHAND);
    once("once, not blocked", SA_RESETHAND | SA_NODEFER);
    return 0;
}

// Credentials are each thread's, and a child of vfork has its own: who makes and opens what is who makes the call.
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static sem_t go, done;

static void owner(const char *name) {
    struct stat st = {0};
    int fd = open(name, O_RDWR | O_CREAT, 0600);
    if (fd < 0)
        printf("%s: refused\n", name);
    else
    {
        int ret = fstat(fd, &st);
        printf("%s: %d, %u:%u\n", name, ret, st.st_uid, st.st_gid);
    }
    close(fd);
}

static void *other(void *by_hand) {
    sem_wait(&go);
    // Of this thread only.
    if (by_hand)
        syscall(SYS_setresuid, -1, 1000, -1);
    else
        setfsuid(1000);
    owner("of the thread");
    owner("secret");
    sem_post(&done);
    sem_wait(&go);
    owner("of the thread, later");
    owner("secret");
    sem_post(&done);
    return 0;
}

static void two_threads(int by_hand) {
    pthread_t thread;
    pthread_create(&thread, 0, other, by_hand ? &go : 0);
    sem_post(&go);
    sem_wait(&done);
    owner("of the process");
    owner("secret");
    sem_post(&go);
    sem_wait(&done);
    owner("of the process, later");
    pthread_join(thread, 0);
    for (const char *names[] = {"of the thread", "of the thread, later", "of the process", "of the process, later", 0}, **n = names; *n; n++)
        unlink(*n);
}

static void child(int which) {
    if (!vfork()) {
        if (which == 0) {
            setgid(65534);
            setuid(65534);
        } else if (which == 1) {
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_FSIZE, &none);
        } else if (which == 2) {
            setfsuid(1000);
        } else {
            chroot("/");
        }
        execl("/bin/true", "true", (char *)0);
        _exit(1);
    }
    int status;
    wait(&status);
    printf("child %d: %d\n", which, status);
}

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IONBF, 0);
    chdir(argv[1]);
    chmod(".", 0777);
    close(creat("secret", 0600));
    sem_init(&go, 0, 0);
    sem_init(&done, 0, 0);
    two_threads(0);
    two_threads(1);
    for (int which = 0; which < 4; which++) {
        child(which);
        char name[32];
        sprintf(name, "behind child %d", which);
        owner(name);
        int fd = open(name, O_WRONLY);
        printf("write %zd\n", write(fd, "text", 4));
        close(fd);
    }
    owner("secret");
    return 0;
}

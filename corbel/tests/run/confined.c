// A program that judges its own system calls: nothing but what it makes itself may be made.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ALLOW(nr) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

// Ways 3 and 4 may also make processes and programs.
static void confine(int how) {
    struct sock_filter makes[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_write), ALLOW(SYS_fork), ALLOW(SYS_vfork), ALLOW(SYS_wait4), ALLOW(SYS_execve), ALLOW(SYS_exit_group),
        // What rewrites an environment.
        ALLOW(SYS_mmap), ALLOW(SYS_munmap),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_read), ALLOW(SYS_write), ALLOW(SYS_lseek), ALLOW(SYS_close), ALLOW(SYS_exit_group), ALLOW(SYS_fsync),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (how > 2)
        program = (struct sock_fprog){sizeof makes / sizeof *makes, makes};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    long ret = how != 1 && how != 2 ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)
               : how == 1 ? prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)
                          : prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    if (ret)
        _exit(50);
}

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IONBF, 0);
    chdir(argv[1]);
    // Asked for the flags that there are: that changes nothing.
    printf("asked %ld\n", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 1, 0));
    int fd = open("in", O_RDWR | O_CREAT, 0644);
    write(fd, "what is to be read", 18);
    for (int how = 0; how < 3; how++) {
        lseek(fd, 0, SEEK_SET);
        fflush(stdout);
        if (!fork()) {
            char text[32] = "";
            int in = how ? open("in", O_RDONLY) : fd, out = open("out", O_WRONLY | O_CREAT | O_TRUNC, 0644);
            confine(how);
            long got = read(in, text, 18), put = write(out, text, got);
            if (how < 2) {
                lseek(out, 0, SEEK_SET);
                put = write(out, "W", 1) + put;
                fsync(out);
                close(out);
            }
            if (how == 2)
                syscall(SYS_exit, got + put);
            _exit(got + put);
        }
        int status;
        wait(&status);
        char text[32] = "";
        int out = open("out", O_RDONLY);
        read(out, text, 31);
        printf("way %d: status %d, [%s]\n", how, status, text);
    }
    for (int how = 3; how < 5; how++) {
        if (!fork()) {
            confine(how);
            char *none[] = {0};
            int status = 0;
            // (glibc's fork tells the kernel more.)
            long child = how == 3 ? syscall(SYS_fork) : vfork();
            if (!child) {
                execve("/nonexistent", none, none);
                write(1, "child\n", 6);
                _exit(7);
            }
            syscall(SYS_wait4, child, &status, 0, 0);
            write(1, "parent\n", 7);
            _exit(status >> 8);
        }
        int status;
        wait(&status);
        printf("way %d: status %d\n", how, status);
    }
    return 0;
}

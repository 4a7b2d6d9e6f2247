/* How far below its stack a system call writes, on a stack of the program's own: as Go has them, with 2 KiB and less. The first
   call of a thread makes what the thread needs. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIZE = 1 << 16 };
static char *area;
static int poll, file;

__attribute__((naked, noinline)) static long ctl(long a, long b, long c, long d)
{
    __asm__("mov %rcx, %r10; mov $0xe9, %eax; syscall; ret");
}

__attribute__((naked, noinline)) static long shut(long a, long b, long c, long d)
{
    __asm__("mov $3, %eax; syscall; ret");
}

__attribute__((naked, noinline)) static long on(void *f, long a, long b, long c, long d, void *sp)
{
    __asm__("push %rbp; mov %rsp, %rbp; mov %r9, %rsp; mov %rdi, %rax; mov %rsi, %rdi;"
            "mov %rdx, %rsi; mov %rcx, %rdx; mov %r8, %rcx; call *%rax;"
            "mov %rbp, %rsp; pop %rbp; ret");
}

static void probe(const char *who, const char *what, void *f, long a, long b, long c, long d)
{
    memset(area, 0xaa, SIZE);
    on(f, a, b, c, d, area + SIZE - 64);
    int i = 0;
    while (i < SIZE && (unsigned char)area[i] == 0xaa)
        i++;
    int deep = SIZE - 64 - 8 - i;
    printf("%s %s: %s\n", who, what, deep <= 400 ? "little" : "much");
    if (deep > 400)
        printf("%d bytes\n", deep);
}

static void *thread(void *who)
{
    struct epoll_event event = { EPOLLIN, { .u64 = 5 } };
    probe(who, "epoll_ctl", ctl, poll, EPOLL_CTL_ADD, file, (long)&event);
    probe(who, "epoll_ctl", ctl, poll, EPOLL_CTL_DEL, file, (long)&event);
    probe(who, "close", shut, 999, 0, 0, 0);
    return NULL;
}

static void *closes(void *who)
{
    probe(who, "close", shut, 999, 0, 0, 0);
    return NULL;
}

int main(int count, char **args)
{
    area = malloc(SIZE);
    if (count > 1 && chdir(args[1]))
        return 1;
    poll = epoll_create1(0);
    file = open("deep-file", O_RDWR | O_CREAT, 0600);
    thread("main");
    pthread_t other;
    pthread_create(&other, NULL, thread, "new");
    pthread_join(other, NULL);
    pthread_create(&other, NULL, closes, "another");
    pthread_join(other, NULL);
    thread("main again");
    closes("main again");
    return 0;
}

/* Every kind of call, its result and errno printed: the output must be the same on any file
   system. argv[1]: a directory. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <fcntl.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <spawn.h>
#include <poll.h>
#include <sys/wait.h>
#include <sys/stat.h>
#include <sys/select.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <sys/time.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <pthread.h>
#include <setjmp.h>

extern char **environ;

#define R(x)                                                                                       \
    do {                                                                                           \
        errno = 0;                                                                                 \
        long r_ = (long)(x);                                                                       \
        printf("%-40.40s %ld %s\n", #x, r_, r_ < 0 ? strerror(errno) : "");                        \
    } while (0)

static int nsig, hfd;

static void onalrm(int s)
{
    char c = 'h';
    nsig++;
    pwrite(hfd, &c, 1, 0);
}

static void onsegv(int s)
{
    write(1, "segv handler\n", 13);
    _exit(3);
}

static void *thr(void *a)
{
    char n[64];
    for (int i = 0; i < 300; i++) {
        struct stat s;
        snprintf(n, 64, "t%ld-%d", (long)a, i);
        int f = open(n, O_CREAT | O_RDWR, 0600);
        if (f < 0) {
            perror("open");
            break;
        }
        write(f, "x", 1);
        fstat(f, &s);
        if (s.st_size != 1)
            printf("size %ld\n", (long)s.st_size);
        close(f);
        unlink(n);
    }
    return 0;
}

static void *shared(void *a)
{
    for (int i = 0; i < 1000; i++)
        write((long)a, "0123456789", 10);
    return 0;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, 0, _IONBF, 0);
    chdir(argv[1]);
    mkdir("calls", 0755);
    chdir("calls");

    /* errors and offsets */
    int f=open("a", O_CREAT|O_RDWR|O_TRUNC, 0644);
    R(f);
    R(write(f, "hello world", 11));
    R(write(f, (void*)8, 5));
    lseek(f, 0, 0);
    R(read(f, (void*)8, 5));
    lseek(f, 11, 0);
    R(pread(f, (void*)-4096, 5, 0));
    R(open((char*)8, O_RDONLY));
    R(stat("a", (void*)8));
    R(open("nope", O_RDONLY));
    R(open("a/b", O_RDONLY));
    R(open("a", O_CREAT|O_EXCL, 0600));
    R(open(".", O_WRONLY));
    R(open("", O_RDONLY));
    char big[5000];
    memset(big, 'n', 4999);
    big[4999]=0;
    R(open(big, O_RDONLY));
    big[300]=0;
    R(open(big, O_RDONLY));
    R(lseek(f, -1, SEEK_SET));
    R(lseek(f, 0, SEEK_CUR));
    R(lseek(f, -5, SEEK_END));
    char b[64]={0};
    R(read(f, b, 64));
    puts(b);

    /* dup and flags */
    int d=dup(f);
    R(d);
    R(lseek(f, 1, SEEK_SET));
    R(lseek(d, 0, SEEK_CUR));
    R(fcntl(d, F_GETFD));
    R(fcntl(d, F_SETFD, FD_CLOEXEC));
    R(fcntl(d, F_GETFD));
    R(fcntl(f, F_GETFD));
    R(fcntl(f, F_GETFL)&O_ACCMODE);
    R(fcntl(f, F_DUPFD, 20));
    R(fcntl(f, F_DUPFD_CLOEXEC, 20));
    R(dup2(f, 30));
    R(dup2(30, 30));
    R(dup2(99, 31));
    R(close(99));

    /* readiness */
    struct pollfd p={f, POLLIN|POLLOUT, 0};
    R(poll(&p, 1, 1000));
    R(p.revents);
    int pp[2];
    pipe(pp);
    struct pollfd p2[2]={{f, POLLIN, 0}, {pp[0], POLLIN, 0}};
    R(poll(p2, 2, 1000));
    R(p2[1].revents);
    fd_set rs;
    FD_ZERO(&rs);
    FD_SET(f, &rs);
    FD_SET(pp[0], &rs);
    R(select(40, &rs, 0, 0, 0));
    R(FD_ISSET(f, &rs));
    R(FD_ISSET(pp[0], &rs));
    int ep=epoll_create1(0);
    struct epoll_event ev={EPOLLIN};
    R(epoll_ctl(ep, EPOLL_CTL_ADD, f, &ev));

    /* vectors and sizes */
    R(isatty(f));
    struct iovec iv[2]={{"AB", 2}, {"CD", 2}};
    lseek(f, 0, 0);
    R(writev(f, iv, 2));
    R(pwritev(f, iv, 2, 20));
    struct stat s;
    fstat(f, &s);
    R(s.st_size);
    R(ftruncate(f, 5));
    fstat(f, &s);
    R(s.st_size);
    R(fallocate(f, 0, 0, 100));
    fstat(f, &s);
    R(s.st_size);

    /* append */
    int ap=open("ap", O_CREAT|O_WRONLY|O_APPEND|O_TRUNC, 0600);
    R(write(ap, "12345", 5));
    R(pwrite(ap, "67", 2, 0));
    fstat(ap, &s);
    R(s.st_size);
    R(lseek(ap, 0, SEEK_CUR));
    R(read(ap, b, 1));

    /* names */
    R(mkdir("d", 0755));

    /* names */
    R(mkdir("d", 0755));
    R(rmdir("d"));
    R(rmdir("d"));
    R(unlink("."));
    R(rename("a", "a2"));
    R(rename("nope", "x"));
    R(link("a2", "a3"));
    R(symlink("a3", "l"));
    R(readlink("l", b, 64));
    R(open("l", O_NOFOLLOW));
    R(access("l", R_OK));
    R(unlink("l"));
    R(symlink("loop", "loop"));
    R(open("loop", 0));
    R(unlink("loop"));
    R(rename("a2", "/proc/version"));

    /* fork inheritance */
    lseek(f, 0, 0);
    if(!fork()){ write(f, "child", 5); _exit(0);}
    wait(0);
    R(lseek(f, 0, SEEK_CUR));
    R(write(f, "+par", 4));
    if(!vfork()){ execl("/bin/echo", "echo", "vfork", (char*)0); _exit(1);}
    wait(0);

    /* spawn w/ actions */
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 1, "spawned", O_CREAT|O_WRONLY|O_TRUNC, 0644);
    posix_spawn_file_actions_adddup2(&fa, f, 7);
    char*av[]={"sh", "-c", "echo spawned; echo seven >&7", 0};
    pid_t pid;
    R(posix_spawn(&pid, "/bin/sh", &fa, 0, av, environ));
    int st;
    waitpid(pid, &st, 0);
    R(st);
    R(lseek(f, 0, SEEK_CUR));
    int sp=open("spawned", O_RDONLY);
    memset(b, 0, 64);
    R(read(sp, b, 64));
    printf("%s", b);
    R(close(sp));
    R(posix_spawn(&pid, "/nonexistent", 0, 0, av, environ)==ENOENT);
    R(write(1, "still\n", 6));

    /* unlinked survive */
    int u=open("u", O_CREAT|O_RDWR, 0600);
    write(u, "unlinked", 8);
    unlink("u");
    if(!fork()){ memset(b, 0, 64); pread(u, b, 64, 0); printf("%s\n", b); char t[16]; sprintf(t, "%d", u); lseek(u, 0, 0); dup2(u, 0); execl("/bin/cat", "cat", (char*)0); }
    wait(0);
    puts("");
    int u2=open("u2", O_CREAT|O_RDWR, 0600);
    write(u2, "shared", 6);
    if(!fork()){ usleep(100000); memset(b, 0, 64); R(pread(u2, b, 64, 0)); puts(b); _exit(0);}
    unlink("u2");
    close(u2);
    wait(0);

    /* locks */
    int lk=open("lk", O_CREAT|O_RDWR, 0600);
    struct flock fl={F_WRLCK, SEEK_SET, 0, 10};
    R(fcntl(lk, F_SETLK, &fl));
    if(!fork()){ struct flock q={F_WRLCK, SEEK_SET, 0, 10}; R(fcntl(lk, F_SETLK, &q)); q.l_type=F_WRLCK; R(fcntl(lk, F_GETLK, &q)); R(q.l_pid==getppid()); _exit(0);}
    wait(0);
    int lk2=open("lk", O_RDONLY);
    close(lk2);
    if(!fork()){ struct flock q={F_WRLCK, SEEK_SET, 0, 10}; R(fcntl(lk, F_SETLKW, &q)); _exit(0);}
    wait(0);
    R(flock(lk, LOCK_EX));
    R(flock(lk, LOCK_UN));
    R(write(lk, "k", 1));

    /* copy */
    int src=open("src", O_CREAT|O_RDWR, 0600); pwrite(src, big, 5000, 0); lseek(src, 0, 0);
    fstat(src, &s);
    int dst=open("pw", O_CREAT|O_RDWR|O_TRUNC, 0600);
    R(copy_file_range(src, 0, dst, 0, 1<<20, 0)==s.st_size);
    lseek(src, 0, 0);
    R(sendfile(dst, src, 0, 1<<20)==s.st_size);
    R(lseek(dst, 0, SEEK_CUR)==2*s.st_size);
    off_t o=0;
    int pi[2];
    pipe(pi);
    R(sendfile(pi[1], dst, &o, 100));
    R(o);
    R(read(pi[0], b, 64));
    R(splice(dst, &(off_t){0}, pi[1], 0, 10, 0));

    /* SCM_RIGHTS */
    int sv[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, sv);
    char cb[CMSG_SPACE(4)];
    struct iovec io={"x", 1};
    struct msghdr m={0, 0, &io, 1, cb, sizeof cb};
    struct cmsghdr*c=CMSG_FIRSTHDR(&m);
    c->cmsg_level=SOL_SOCKET;
    c->cmsg_type=SCM_RIGHTS;
    c->cmsg_len=CMSG_LEN(4);
    memcpy(CMSG_DATA(c), &dst, 4);
    R(sendmsg(sv[0], &m, 0));
    m.msg_controllen=sizeof cb;
    char xb;
    io.iov_base=&xb;
    R(recvmsg(sv[1], &m, 0));
    int got;
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), 4);
    R(pread(got, b, 4, 0));

    /* mmap */
    char*mp=mmap(0, 4096, PROT_READ, MAP_PRIVATE, dst, 0);
    R(mp!=MAP_FAILED&&!memcmp(mp, b, 4));
    mp=mmap(0, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, dst, 0);
    R(mp!=MAP_FAILED);
    memcpy(mp, "MMAP", 4);
    msync(mp, 4096, MS_SYNC);
    R(pread(dst, b, 4, 0));
    printf("%.4s\n", b);
    int again=open("pw", O_RDONLY);
    R(pread(again, b, 4, 0));
    printf("%.4s\n", b);

    /* signals */

    /* signals */
    hfd=open("h", O_CREAT|O_RDWR, 0600);
    signal(SIGALRM, onalrm);
    struct itimerval it={{0, 200}, {0, 200}};
    setitimer(ITIMER_REAL, &it, 0);
    for(int i=0;i<20000;i++){ char x[32]; if(pwrite(hfd, "0123456789", 10, i%7)!=10) puts("bad w"); if(pread(hfd, x, 10, i%7)!=10) puts("bad r"); if(i%100==0){int q=open("q", O_CREAT|O_RDWR, 0600); close(q); unlink("q");} }
    memset(&it, 0, sizeof it);
    setitimer(ITIMER_REAL, &it, 0);
    R(nsig>10);
    struct sigaction sa;
    sigaction(SIGALRM, 0, &sa);
    R(sa.sa_handler==onalrm);
    sigaction(SIGSEGV, 0, &sa);
    R(sa.sa_handler==SIG_DFL);

    /* threads */
    pthread_t t[8];
    for(long i=0;i<8;i++) pthread_create(&t[i], 0, thr, (void*)i);
    for(int i=0;i<8;i++) pthread_join(t[i], 0);
    int sh=open("sh", O_CREAT|O_RDWR|O_TRUNC, 0600);
    for(int i=0;i<4;i++) pthread_create(&t[i], 0, shared, (void*)(long)sh);
    for(int i=0;i<4;i++) pthread_join(t[i], 0);
    fstat(sh, &s);
    R(s.st_size);
    R(lseek(sh, 0, SEEK_CUR));
    if(!fork()){ struct stat q; fstat(sh, &q); R(q.st_size); signal(SIGSEGV, onsegv); *(volatile int*)8=1; }
    wait(&st);
    R(WEXITSTATUS(st));
    if(!fork()){ *(volatile int*)8=1; }
    wait(&st);
    R(WTERMSIG(st));

    /* closing everything */
    R(close_range(3, ~0u, 0));
    R(open("last", O_CREAT|O_RDWR, 0600));
    R(read(3, b, 1));
    R(getpid()>0);
    R(open("/proc/self/fd/3", O_RDONLY));
    R(open("/proc/self/fd/3", O_RDONLY));
    R(stat("/dev/fd/3", &s));
    R(S_ISREG(s.st_mode));
    R(chdir("/"));
    R(open("calls", O_RDONLY));
    return 0;
}

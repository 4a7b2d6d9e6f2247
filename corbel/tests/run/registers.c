// A system call made by the program itself leaves every register but rax, rcx and r11 as it was, and the flags.
#define _GNU_SOURCE
#include <fcntl.h>
#include <immintrin.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char buffer[256 << 10];

#define OWN(flags, ret, nr, a, b, c, d)                                                                     \
    do {                                                                                                    \
        register long r10 __asm__("r10") = (long)(d);                                                       \
        register long r8 __asm__("r8") = 0x8888;                                                            \
        __asm__ volatile("lea rsp, [rsp - 256]\n pushfq\n and qword ptr [rsp], -2262\n or qword ptr [rsp], 0x8d5 - 0x100 * 0\n"      \
                         "popfq\n syscall\n pushfq\n pop %1\n lea rsp, [rsp + 256]"                         \
                         : "=a"(ret), "=&r"(flags), "+r"(r8)                                                \
                         : "a"((long)(nr)), "D"((long)(a)), "S"((long)(b)), "d"((long)(c)), "r"(r10)        \
                         : "rcx", "r11", "memory", "cc");                                                   \
        if (r8 != 0x8888) puts("r8 is lost");                                                               \
    } while (0)

static void say(const char *what, long ret, unsigned long flags) {
    // Carry, parity, adjust, zero, sign, overflow.
    printf("%s %ld flags %lx\n", what, ret, flags & 0x8d5);
}

__attribute__((noinline)) static void flags(int fd, int pipe) {
    unsigned long f;
    long ret;
    OWN(f, ret, SYS_pwrite64, fd, buffer, 4096, 0);
    say("pwrite", ret, f);
    OWN(f, ret, SYS_pread64, fd, buffer, 4096, 0);
    say("pread", ret, f);
    OWN(f, ret, SYS_write, pipe, buffer, 1, 0);
    say("write to a pipe", ret, f);
    OWN(f, ret, SYS_lseek, fd, 0, SEEK_END, 0);
    say("lseek", ret, f);
    OWN(f, ret, SYS_fcntl, fd, F_GETFD, 0, 0);
    say("fcntl", ret, f);
}

// String operations that go backwards, which are the program's alone.
__attribute__((noinline)) static void backwards(int fd) {
    char text[301] = "", forwards[301] = "";
    struct stat stats[3] = {0};
    for (int i = 0; i < 300; i++)
        forwards[i] = 'a' + i % 23;
    long calls[] = {SYS_pwrite64, SYS_pread64, SYS_fstat};
    void *at[] = {forwards, text, &stats[1]};
    for (int i = 0; i < 3; i++) {
        register long r10 __asm__("r10") = 0;
        unsigned long f;
        long ret;
        __asm__ volatile("lea rsp, [rsp - 256]\n std\n syscall\n pushfq\n pop %1\n cld\n lea rsp, [rsp + 256]"
                         : "=a"(ret), "=&r"(f)
                         : "a"(calls[i]), "D"((long)fd), "S"(at[i]), "d"(300l), "r"(r10)
                         : "rcx", "r11", "memory", "cc");
        printf("backwards %ld flag %lx\n", ret, f & 0x400);
    }
    printf("%s %ld %ld %o\n", text, stats[0].st_size, stats[1].st_size, stats[1].st_mode);
}

__attribute__((target("avx2"), noinline)) static void vectors(int fd) {
    unsigned long f;
    long ret;
    __m256i in[16], out[16];
    for (int i = 0; i < 16; i++)
        in[i] = _mm256_set1_epi64x(0x0101010101010101 * (i + 1));
    for (int round = 0; round < 64; round++) {
        __asm__ volatile("vmovdqu ymm0, [%0]\n vmovdqu ymm1, [%0+32]\n vmovdqu ymm2, [%0+64]\n vmovdqu ymm3, [%0+96]\n"
                         "vmovdqu ymm4, [%0+128]\n vmovdqu ymm5, [%0+160]\n vmovdqu ymm6, [%0+192]\n vmovdqu ymm7, [%0+224]\n"
                         "vmovdqu ymm8, [%0+256]\n vmovdqu ymm9, [%0+288]\n vmovdqu ymm10, [%0+320]\n vmovdqu ymm11, [%0+352]\n"
                         "vmovdqu ymm12, [%0+384]\n vmovdqu ymm13, [%0+416]\n vmovdqu ymm14, [%0+448]\n vmovdqu ymm15, [%0+480]\n" ::"r"(in)
                         : "memory");
        OWN(f, ret, SYS_pwrite64, fd, buffer, sizeof buffer, 0);
        __asm__ volatile("vmovdqu [%0], ymm0\n vmovdqu [%0+32], ymm1\n vmovdqu [%0+64], ymm2\n vmovdqu [%0+96], ymm3\n"
                         "vmovdqu [%0+128], ymm4\n vmovdqu [%0+160], ymm5\n vmovdqu [%0+192], ymm6\n vmovdqu [%0+224], ymm7\n"
                         "vmovdqu [%0+256], ymm8\n vmovdqu [%0+288], ymm9\n vmovdqu [%0+320], ymm10\n vmovdqu [%0+352], ymm11\n"
                         "vmovdqu [%0+384], ymm12\n vmovdqu [%0+416], ymm13\n vmovdqu [%0+448], ymm14\n vmovdqu [%0+480], ymm15\n" ::"r"(out)
                         : "memory");
        for (int i = 0; i < 16; i++)
            if (memcmp(&in[i], &out[i], 32))
                printf("round %d: ymm%d is lost\n", round, i);
    }
    printf("vectors %ld\n", ret);
}

int main(int argc, char **argv) {
    int ends[2];
    chdir(argv[1]);
    int fd = open("file", O_RDWR | O_CREAT, 0644);
    pipe(ends);
    flags(fd, ends[1]);
    backwards(fd);
    if (__builtin_cpu_supports("avx2"))
        vectors(fd);
    return 0;
}

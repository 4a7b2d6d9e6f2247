/* A log-structured merge tree for `corbel bench linefs`, an ordinary program that knows nothing of Corbel. It is no LevelDB and shares
 * no code with it: it asks a file system for what LevelDB asks for, so that the loads of db_bench can be told of where there is none.
 *
 *   lsm fillseq    DIR VALUE COUNT    COUNT values of VALUE bytes, keys ascending, into a new tree
 *   lsm fillrandom DIR VALUE COUNT    the same, keys at random
 *   lsm fillsync   DIR VALUE COUNT    the same, each of them durable before the next
 *   lsm readseq    DIR VALUE COUNT    COUNT values of a tree that is there, in the order of their keys
 *   lsm readrandom DIR VALUE COUNT    COUNT look-ups at random
 *   lsm readhot    DIR VALUE COUNT    the same, of the first hundredth of the keys
 *
 * What is LevelDB's: a record in the log for each value by a write of its own; 4 MiB in memory, then a new log, and a table of blocks of
 * 4 KiB by a thread beside, through a buffer of 64 KiB, with a sync; four tables that overlap are merged with those below them into tables
 * of 2 MiB, each with a sync; a record in the MANIFEST, with a sync, for each such step, and CURRENT by a rename when a tree is opened;
 * writers that get ahead of the thread wait, 1 ms from eight tables on and for it from twelve. What is not: one level below the first
 * instead of six, no compression, no cache of blocks (each look-up asks the file system), no deletions.
 *
 * Prints one line of JSON; the thread's rest, and opening a tree, are not timed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <nmmintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    KEY = 16,
    BLOCK = 4096,
    HEAD = 8, /* of a record or block: its checksum and its length */
    BUFFER = 64 << 10,
    MEMORY = 4 << 20,
    TABLE = 2 << 20,
    MERGE = 4,
    SLOW = 8,
    STOP = 12,
    HEIGHT = 12,
    TABLES = 1024,
    MAGIC = 0x6c736d31,
};

static const char *dir;
static size_t value_bytes, entry_bytes, block_entries;

static void die(const char *what) {
    fprintf(stderr, "lsm: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *memory(size_t bytes) {
    void *at = malloc(bytes);
    if (at == NULL)
        die("memory");
    return at;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t next_random(void) {
    static uint64_t state = 0x9e3779b97f4a7c15u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state >> 11;
}

__attribute__((target("sse4.2"))) static uint32_t checksum(const char *from, size_t len) {
    uint64_t sum = ~0u, word;
    for (; len >= 8; from += 8, len -= 8) {
        memcpy(&word, from, 8);
        sum = _mm_crc32_u64(sum, word);
    }
    for (; len > 0; from++, len--)
        sum = _mm_crc32_u8((uint32_t)sum, (uint8_t)*from);
    return (uint32_t)sum;
}

/* ---- files ---- */

static const char *named(char *path, const char *name, uint64_t number) {
    if (number != 0)
        snprintf(path, 4096, "%s/%06lu.%s", dir, number, name);
    else
        snprintf(path, 4096, "%s/%s", dir, name);
    return path;
}

static int opened(const char *name, uint64_t number, int flags) {
    char path[4096];
    int fd = open(named(path, name, number), flags | O_CLOEXEC, 0644);
    if (fd < 0)
        die(path);
    return fd;
}

static void removed(const char *name, uint64_t number) {
    char path[4096];
    if (unlink(named(path, name, number)) != 0)
        die(path);
}

static void put_all(int fd, const char *from, size_t len) {
    if (write(fd, from, len) != (ssize_t)len)
        die("write");
}

static void synced(int fd) {
    if (fdatasync(fd) != 0)
        die("fdatasync");
}

/* A record, in the log and in the MANIFEST. */
static void append(int fd, const char *from, size_t len) {
    static __thread char record[BUFFER];
    uint32_t head[2] = {checksum(from, len), (uint32_t)len};
    memcpy(record, head, HEAD);
    memcpy(record + HEAD, from, len);
    put_all(fd, record, HEAD + len);
}

/* The next one; 0 at the end, or where it is torn. */
static size_t next_record(int fd, char *to) {
    uint32_t head[2];
    if (read(fd, head, HEAD) != HEAD || head[1] > BUFFER - HEAD ||
        read(fd, to, head[1]) != (ssize_t)head[1] || checksum(to, head[1]) != head[0])
        return 0;
    return head[1];
}

/* ---- what is in memory: a skip list ---- */

struct node {
    struct node *next[HEIGHT];
    char entry[]; /* key and value */
};

struct list {
    struct node *first[HEIGHT];
    size_t bytes;
    uint64_t log;
};

static struct node *find(struct list *list, const char *key, struct node ***before) {
    struct node **at = list->first;
    for (int level = HEIGHT - 1; level >= 0; level--) {
        while (at[level] != NULL && memcmp(at[level]->entry, key, KEY) < 0)
            at = at[level]->next;
        if (before != NULL)
            before[level] = &at[level];
    }
    struct node *found = at[0];
    return found != NULL && memcmp(found->entry, key, KEY) == 0 ? found : NULL;
}

static void insert(struct list *list, const char *entry) {
    struct node **before[HEIGHT], *node = find(list, entry, before);
    if (node == NULL) {
        node = memory(sizeof *node + entry_bytes);
        for (int level = 0, up = 1; level < HEIGHT; level++) {
            node->next[level] = up ? *before[level] : NULL;
            if (up)
                *before[level] = node;
            up = up && next_random() % 4 == 0;
        }
    }
    memcpy(node->entry, entry, entry_bytes);
    list->bytes += entry_bytes;
}

static struct list *new_list(void) {
    struct list *list = memory(sizeof *list);
    memset(list, 0, sizeof *list);
    return list;
}

static void drop_list(struct list *list) {
    for (struct node *node = list->first[0], *next; node != NULL; node = next) {
        next = node->next[0];
        free(node);
    }
    free(list);
}

/* ---- tables ---- */

struct table {
    uint64_t number;
    int fd;
    uint32_t blocks, entries;
    char (*firsts)[KEY]; /* of each block */
    char last[KEY];
};

struct writer {
    int fd;
    uint32_t entries, blocks;
    size_t buffered, in_block;
    uint64_t number, bytes;
    char last[KEY], *firsts, *block, *buffer;
};

static struct writer *new_table(uint64_t number) {
    struct writer *w = memory(sizeof *w);
    memset(w, 0, sizeof *w);
    w->number = number;
    w->fd = opened("ldb", number, O_WRONLY | O_CREAT | O_TRUNC);
    w->firsts = memory((size_t)2 * MEMORY / BLOCK * KEY + KEY);
    w->block = memory(HEAD + block_entries * entry_bytes);
    w->buffer = memory(BUFFER);
    return w;
}

static void buffered(struct writer *w, const char *from, size_t len) {
    w->bytes += len;
    while (len > 0) {
        size_t part = len < BUFFER - w->buffered ? len : BUFFER - w->buffered;
        memcpy(w->buffer + w->buffered, from, part);
        w->buffered += part, from += part, len -= part;
        if (w->buffered == BUFFER) {
            put_all(w->fd, w->buffer, BUFFER);
            w->buffered = 0;
        }
    }
}

static void end_block(struct writer *w) {
    if (w->in_block == 0)
        return;
    size_t len = w->in_block * entry_bytes;
    uint32_t head[2] = {checksum(w->block + HEAD, len), (uint32_t)len};
    memcpy(w->block, head, HEAD);
    buffered(w, w->block, HEAD + len);
    w->blocks++, w->in_block = 0;
}

static void add(struct writer *w, const char *entry) {
    if (w->in_block == 0)
        memcpy(w->firsts + (size_t)w->blocks * KEY, entry, KEY);
    memcpy(w->block + HEAD + w->in_block * entry_bytes, entry, entry_bytes);
    memcpy(w->last, entry, KEY);
    w->entries++;
    if (++w->in_block == block_entries)
        end_block(w);
}

static struct table *open_table(uint64_t number) {
    struct table *table = memory(sizeof *table);
    table->number = number;
    table->fd = opened("ldb", number, O_RDONLY);
    off_t end = lseek(table->fd, 0, SEEK_END);
    uint32_t foot[3];
    if (end < (off_t)sizeof foot ||
        pread(table->fd, foot, sizeof foot, end - (off_t)sizeof foot) != sizeof foot || foot[2] != MAGIC)
        die("a table's end");
    table->blocks = foot[0], table->entries = foot[1];
    size_t index = (size_t)foot[0] * KEY;
    table->firsts = memory(index + KEY);
    if (pread(table->fd, table->firsts, index + KEY, end - (off_t)(sizeof foot + index + KEY)) !=
        (ssize_t)(index + KEY))
        die("a table's index");
    memcpy(table->last, table->firsts[table->blocks], KEY);
    return table;
}

static struct table *end_table(struct writer *w) {
    end_block(w);
    uint32_t foot[3] = {w->blocks, w->entries, MAGIC};
    buffered(w, w->firsts, (size_t)w->blocks * KEY);
    buffered(w, w->last, KEY);
    buffered(w, (char *)foot, sizeof foot);
    put_all(w->fd, w->buffer, w->buffered);
    synced(w->fd);
    close(w->fd);
    struct table *table = open_table(w->number);
    free(w->firsts), free(w->block), free(w->buffer), free(w);
    return table;
}

/* Entries of a block; how many. */
static size_t get_block(const struct table *table, uint32_t block, char *to) {
    size_t whole = HEAD + block_entries * entry_bytes;
    size_t first = (size_t)block * block_entries;
    size_t entries = table->entries - first < block_entries ? table->entries - first : block_entries;
    size_t len = HEAD + entries * entry_bytes;
    uint32_t head[2];
    if (pread(table->fd, to, len, (off_t)(block * whole)) != (ssize_t)len)
        die("a block");
    memcpy(head, to, HEAD);
    if (head[1] != len - HEAD || head[0] != checksum(to + HEAD, len - HEAD)) {
        fprintf(stderr, "lsm: block %u of table %lu is damaged\n", block, table->number);
        exit(1);
    }
    return entries;
}

static int overlap(const struct table *table, const char *first, const char *last) {
    return memcmp(table->firsts[0], last, KEY) <= 0 && memcmp(first, table->last, KEY) <= 0;
}

static int by_first(const void *a, const void *b) {
    return memcmp((*(struct table *const *)a)->firsts[0], (*(struct table *const *)b)->firsts[0], KEY);
}

/* ---- the tree: what the writer and the thread share is the lock's ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct list *mutable, *full;
static struct table *upper[TABLES], *lower[TABLES]; /* the newest last; by key */
static size_t uppers, lowers;
static int log_fd, manifest, closing;
static uint64_t next_number = 1;

/* One that some source has next. Tables of one source follow each other. */
struct cursor {
    struct table **tables;
    size_t count, at, entries, entry;
    uint32_t block;
    char *buffer;
};

static const char *current(struct cursor *c) {
    while (c->entry == c->entries) {
        if (c->at == c->count)
            return NULL;
        if (c->block == c->tables[c->at]->blocks) {
            c->at++, c->block = 0;
            continue;
        }
        c->entries = get_block(c->tables[c->at], c->block++, c->buffer);
        c->entry = 0;
    }
    return c->buffer + HEAD + c->entry * entry_bytes;
}

/* The least of all; of those with one key that of the last source. */
static const char *least(struct cursor *sources, size_t count) {
    const char *best = NULL;
    for (size_t i = 0; i < count; i++) {
        const char *here = current(&sources[i]);
        if (here != NULL && (best == NULL || memcmp(here, best, KEY) <= 0))
            best = here;
    }
    return best;
}

static void step(struct cursor *sources, size_t count, const char *key) {
    char past[KEY];
    memcpy(past, key, KEY);
    for (size_t i = 0; i < count; i++) {
        const char *here = current(&sources[i]);
        if (here != NULL && memcmp(here, past, KEY) == 0)
            sources[i].entry++;
    }
}

/* Those of below, as one, then those of above. */
static size_t sources_of(struct cursor *sources, struct table **low, size_t lows, struct table **high, size_t highs) {
    memset(sources, 0, (1 + highs) * sizeof *sources);
    for (size_t i = 0; i <= highs; i++) {
        sources[i].tables = i == 0 ? low : &high[i - 1];
        sources[i].count = i == 0 ? lows : 1;
        sources[i].buffer = memory(HEAD + block_entries * entry_bytes);
    }
    return 1 + highs;
}

static void drop_sources(struct cursor *sources, size_t count) {
    for (size_t i = 0; i < count; i++)
        free(sources[i].buffer);
}

/* What the tree has now, as a record. (LevelDB writes what has changed.) */
static void noted(uint64_t log) {
    static uint64_t record[3 + 2 * TABLES];
    pthread_mutex_lock(&lock);
    size_t words = 0;
    record[words++] = log;
    record[words++] = uppers;
    for (size_t i = 0; i < uppers; i++)
        record[words++] = upper[i]->number;
    for (size_t i = 0; i < lowers; i++)
        record[words++] = lower[i]->number;
    pthread_mutex_unlock(&lock);
    append(manifest, (char *)record, words * sizeof *record);
    synced(manifest);
}

static uint64_t numbered(void) {
    return __atomic_fetch_add(&next_number, 1, __ATOMIC_SEQ_CST);
}

static void put_lower(struct table *table) {
    if (lowers == TABLES)
        die("too many tables");
    lower[lowers++] = table;
    qsort(lower, lowers, sizeof *lower, by_first);
}

/* Only the thread changes tables, so it may read them without the lock. */
static void flush(struct list *list, uint64_t log) {
    if (list->first[0] == NULL)
        return;
    struct writer *w = new_table(numbered());
    for (struct node *node = list->first[0]; node != NULL; node = node->next[0])
        add(w, node->entry);
    struct table *table = end_table(w);
    int over = 0;
    for (size_t i = 0; i < uppers + lowers; i++)
        over |= overlap(i < uppers ? upper[i] : lower[i - uppers], table->firsts[0], table->last);
    pthread_mutex_lock(&lock);
    if (over)
        upper[uppers++] = table;
    else
        put_lower(table);
    pthread_mutex_unlock(&lock);
    noted(log);
}

static void merge(void) {
    static struct cursor sources[TABLES + 1];
    static struct table *low[TABLES], *high[TABLES], *made[TABLES];
    size_t highs = uppers, lows = 0, kept = 0, count = 0;
    char first[KEY], last[KEY];
    memcpy(high, upper, highs * sizeof *high);
    memcpy(first, high[0]->firsts[0], KEY), memcpy(last, high[0]->last, KEY);
    for (size_t i = 1; i < highs; i++) {
        if (memcmp(high[i]->firsts[0], first, KEY) < 0)
            memcpy(first, high[i]->firsts[0], KEY);
        if (memcmp(high[i]->last, last, KEY) > 0)
            memcpy(last, high[i]->last, KEY);
    }
    for (size_t i = 0; i < lowers; i++)
        if (overlap(lower[i], first, last))
            low[lows++] = lower[i];
    size_t all = sources_of(sources, low, lows, high, highs);
    struct writer *w = NULL;
    for (const char *entry; (entry = least(sources, all)) != NULL; step(sources, all, entry)) {
        if (w == NULL)
            w = new_table(numbered());
        add(w, entry);
        if (w->bytes >= TABLE) {
            made[count++] = end_table(w);
            w = NULL;
        }
    }
    if (w != NULL)
        made[count++] = end_table(w);
    drop_sources(sources, all);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < lowers; i++)
        if (!overlap(lower[i], first, last))
            lower[kept++] = lower[i];
    lowers = kept, uppers = 0;
    for (size_t i = 0; i < count; i++)
        put_lower(made[i]);
    uint64_t log = full != NULL ? full->log : mutable->log;
    pthread_mutex_unlock(&lock);
    noted(log);
    for (size_t i = 0; i < highs + lows; i++) {
        struct table *gone = i < highs ? high[i] : low[i - highs];
        close(gone->fd);
        removed("ldb", gone->number);
        free(gone->firsts), free(gone);
    }
}

static void *beside(void *nothing) {
    pthread_mutex_lock(&lock);
    for (;;) {
        struct list *list = full;
        if (list != NULL) {
            uint64_t log = mutable->log;
            pthread_mutex_unlock(&lock);
            flush(list, log);
            removed("log", list->log);
            pthread_mutex_lock(&lock);
            full = NULL;
            pthread_cond_broadcast(&changed);
            drop_list(list);
        } else if (uppers >= MERGE) {
            pthread_mutex_unlock(&lock);
            merge();
            pthread_mutex_lock(&lock);
            pthread_cond_broadcast(&changed);
        } else if (closing) {
            break;
        } else {
            pthread_cond_wait(&changed, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
    return nothing;
}

static void new_log(struct list *list) {
    list->log = numbered();
    log_fd = opened("log", list->log, O_WRONLY | O_CREAT | O_TRUNC);
}

static void put(const char *entry, int sync) {
    int waited = 0;
    pthread_mutex_lock(&lock);
    while (mutable->bytes >= MEMORY || (uppers >= SLOW && !waited)) {
        if (uppers >= SLOW && !waited) {
            pthread_mutex_unlock(&lock);
            usleep(1000);
            waited = 1;
            pthread_mutex_lock(&lock);
        } else if (full != NULL || uppers >= STOP) {
            pthread_cond_wait(&changed, &lock);
        } else {
            close(log_fd);
            struct list *list = new_list();
            new_log(list);
            full = mutable, mutable = list;
            pthread_cond_broadcast(&changed);
        }
    }
    pthread_mutex_unlock(&lock);
    append(log_fd, entry, entry_bytes);
    if (sync)
        synced(log_fd);
    insert(mutable, entry);
}

/* Whether the tree has the key. */
static int get(const char *key, char *buffer) {
    for (size_t i = uppers + 1; i-- > 0;) {
        const struct table *table = NULL;
        if (i > 0) {
            table = upper[i - 1];
        } else {
            size_t low = 0, high = lowers;
            while (low < high) {
                size_t middle = (low + high) / 2;
                if (memcmp(lower[middle]->last, key, KEY) < 0)
                    low = middle + 1;
                else
                    high = middle;
            }
            if (low == lowers)
                return 0;
            table = lower[low];
        }
        if (!overlap(table, key, key))
            continue;
        uint32_t low = 0, high = table->blocks;
        while (high - low > 1) {
            uint32_t middle = (low + high) / 2;
            if (memcmp(table->firsts[middle], key, KEY) <= 0)
                low = middle;
            else
                high = middle;
        }
        size_t entries = get_block(table, low, buffer);
        for (size_t entry = 0; entry < entries; entry++)
            if (memcmp(buffer + HEAD + entry * entry_bytes, key, KEY) == 0)
                return 1;
    }
    return 0;
}

/* Logs of what no table has: at most that of what was full and that of what came after. */
static size_t logs_from(uint64_t least, uint64_t *logs) {
    size_t count = 0;
    DIR *names = opendir(dir);
    if (names == NULL)
        die(dir);
    for (struct dirent *name; (name = readdir(names)) != NULL;) {
        uint64_t number = 0;
        int end = 0;
        if (sscanf(name->d_name, "%lu.log%n", &number, &end) != 1 || end == 0 || number < least)
            continue;
        if (count == 2)
            die("too many logs");
        logs[count++] = number;
    }
    closedir(names);
    if (count == 2 && logs[0] > logs[1]) {
        uint64_t first = logs[1];
        logs[1] = logs[0], logs[0] = first;
    }
    return count;
}

/* Reads what is there, makes a table of what only the log has, and writes a MANIFEST of its own, which CURRENT names from then on. */
static void open_tree(int anew) {
    static uint64_t record[BUFFER / sizeof(uint64_t)], torn[BUFFER / sizeof(uint64_t)];
    char path[4096], to[4096], name[64] = "";
    uint64_t log = 0, old = 0;
    mutable = new_list();
    if (!anew) {
        int fd = opened("CURRENT", 0, O_RDONLY);
        if (read(fd, name, sizeof name - 1) <= 0 || sscanf(name, "MANIFEST-%lu", &old) != 1)
            die("CURRENT");
        name[strcspn(name, "\n")] = '\0';
        close(fd);
        fd = opened(name, 0, O_RDONLY);
        size_t words = 0;
        for (size_t len; (len = next_record(fd, (char *)torn)) > 0; words = len / sizeof *record)
            memcpy(record, torn, len);
        close(fd);
        if (words < 2)
            die("MANIFEST");
        log = record[0], uppers = (size_t)record[1], lowers = words - 2 - uppers;
        for (size_t i = 0; i < uppers + lowers; i++) {
            struct table *table = open_table(record[2 + i]);
            *(i < uppers ? &upper[i] : &lower[i - uppers]) = table;
            next_number = table->number >= next_number ? table->number + 1 : next_number;
        }
        next_number = old >= next_number ? old + 1 : next_number;
    }
    uint64_t number = numbered();
    snprintf(name, sizeof name, "MANIFEST-%06lu", number);
    manifest = opened(name, 0, O_WRONLY | O_CREAT | O_TRUNC);
    uint64_t logs[2];
    size_t count = anew ? 0 : logs_from(log, logs);
    for (size_t i = 0; i < count; i++) {
        char *entry = memory(BUFFER);
        int fd = opened("log", logs[i], O_RDONLY);
        while (next_record(fd, entry) == entry_bytes)
            insert(mutable, entry);
        close(fd);
        free(entry);
        next_number = logs[i] >= next_number ? logs[i] + 1 : next_number;
    }
    flush(mutable, log);
    drop_list(mutable);
    mutable = new_list();
    new_log(mutable);
    noted(mutable->log);
    int fd = opened("dbtmp", number, O_WRONLY | O_CREAT | O_TRUNC);
    strcat(name, "\n");
    put_all(fd, name, strlen(name));
    synced(fd);
    close(fd);
    if (rename(named(path, "dbtmp", number), named(to, "CURRENT", 0)) != 0)
        die("rename");
    fd = opened(".", 0, O_RDONLY | O_DIRECTORY);
    if (fsync(fd) != 0)
        die("fsync");
    close(fd);
    if (!anew) {
        snprintf(name, sizeof name, "MANIFEST-%06lu", old);
        removed(name, 0);
    }
    for (size_t i = 0; i < count; i++)
        removed("log", logs[i]);
}

static void set_key(char *entry, uint64_t number) {
    char text[KEY + 8];
    snprintf(text, sizeof text, "%016lu", number % 10000000000000000u);
    memcpy(entry, text, KEY);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: lsm LOAD DIR VALUE COUNT (see lsm.c)\n");
        return 2;
    }
    const char *load = argv[1];
    size_t count = strtoul(argv[4], NULL, 10);
    dir = argv[2], value_bytes = strtoul(argv[3], NULL, 10);
    int fills = strncmp(load, "fill", 4) == 0, sync = strcmp(load, "fillsync") == 0;
    int ordered = strcmp(load, "fillseq") == 0, at_random = strcmp(load, "fillrandom") == 0;
    int scans = strcmp(load, "readseq") == 0, hot = strcmp(load, "readhot") == 0;
    if (!(sync || ordered || at_random || scans || hot || strcmp(load, "readrandom") == 0)) {
        fprintf(stderr, "lsm: no load %s\n", load);
        return 2;
    }
    if (value_bytes < 16 || value_bytes > 16384 || count == 0 || count > 100000000) {
        fprintf(stderr, "lsm: VALUE is 16 to 16384, COUNT 1 to 100000000\n");
        return 2;
    }
    entry_bytes = KEY + value_bytes;
    block_entries = (BLOCK + entry_bytes - 1) / entry_bytes;
    char *entry = memory(entry_bytes), *buffer = memory(HEAD + block_entries * entry_bytes);
    /* Half of a value is noise, as db_bench has it. */
    for (size_t i = 0; i < entry_bytes; i++)
        entry[i] = i < entry_bytes / 2 ? (char)next_random() : 'v';
    open_tree(fills);
    pthread_t thread;
    if (pthread_create(&thread, NULL, beside, NULL) != 0)
        die("a thread");
    if (!fills) {
        /* It merges what it wants to before anything is read. */
        pthread_mutex_lock(&lock);
        closing = 1;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        pthread_join(thread, NULL);
    }
    static struct cursor sources[TABLES + 1];
    size_t all = scans ? sources_of(sources, lower, lowers, upper, uppers) : 0, found = 0;
    uint64_t begin = now();
    for (size_t i = 0; i < count; i++) {
        if (scans) {
            const char *here = least(sources, all);
            if (here == NULL)
                break;
            memcpy(entry, here, entry_bytes);
            step(sources, all, here);
            found++;
            continue;
        }
        uint64_t of = hot ? (count + 99) / 100 : count;
        set_key(entry, ordered ? i : next_random() % of);
        if (fills)
            put(entry, sync);
        else
            found += (size_t)get(entry, buffer);
    }
    uint64_t took = now() - begin;
    if (fills) {
        pthread_mutex_lock(&lock);
        closing = 1;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        pthread_join(thread, NULL);
    }
    drop_sources(sources, all);
    size_t done = scans ? found : count;
    printf("{\"ops\":%zu,\"found\":%zu,\"upper\":%zu,\"lower\":%zu,\"mean_ns\":%lu,\"seconds\":%.6f}\n", done, found, uppers,
           lowers, took / (done > 0 ? done : 1), (double)took / 1e9);
    return 0;
}

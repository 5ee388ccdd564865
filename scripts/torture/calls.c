/* Watches the system calls on files below two folders, and has the n-th of them fail, fall short, wait, or be the last.
 *
 * Built and put before libc by `calls.py` (LD_PRELOAD). Nothing happens until a process calls `watch_calls`; its
 * threads are watched alike. A call that is chosen is noted in the file `note` first: its name and its path.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_WITHIN, KILL_AFTER, FAIL, FAIL_ON, SHORT };

static char written[PATH_MAX], looked[PATH_MAX]; /* folders: changes below the first, and all calls below the second */
static atomic_long seen;
static long chosen;
static int what, failure, every, is_on, note = -1, cannot_exchange, of_written;

void watch_calls(const char *below, const char *of_source, long number, int how, int error, int also_looks,
                 int without_exchange, int note_descriptor) {
    snprintf(written, sizeof written, "%s", below);
    snprintf(looked, sizeof looked, "%s", of_source);
    chosen = number, what = how, failure = error, every = also_looks, cannot_exchange = without_exchange;
    note = note_descriptor;
    atomic_store(&seen, 0);
    is_on = 1;
}

long num_calls(void) { return atomic_load(&seen); }

static int lies_below(const char *path, const char *folder) {
    size_t size = strlen(folder);
    return size && !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}

static const char *path_of(int folder, const char *path, char *room) {
    char link[64];
    ssize_t size;
    if (path && path[0] == '/') return path;
    if (folder == AT_FDCWD) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    size = syscall(SYS_readlinkat, AT_FDCWD, link, room, PATH_MAX - 1);
    if (size <= 0) return NULL;
    room[size] = 0;
    return room;
}

/* How this call is to go: COUNT for as usual. */
static int turn(const char *name, int folder, const char *path, int changes) {
    char room[PATH_MAX], line[PATH_MAX + 64];
    int saved = errno, is_ours;
    long number;
    if (!is_on) return COUNT;
    path = path_of(folder, path, room);
    errno = saved;
    is_ours = path && (lies_below(path, written) ? changes || every : every && lies_below(path, looked));
    if (!is_ours) return COUNT;
    number = atomic_fetch_add(&seen, 1) + 1;
    if (number < chosen || !chosen || (number > chosen && what != FAIL_ON)) return COUNT;
    if (number == chosen) of_written = lies_below(path, written);
    if (lies_below(path, written) != of_written) return COUNT; /* one side fails from there on, not both */
    if (number == chosen && note >= 0) {
        int size = snprintf(line, sizeof line, "%s %s %d\n", name, path, getpid());
        syscall(SYS_write, note, line, size);
    }
    errno = saved;
    if (what == KILL_BEFORE) syscall(SYS_kill, getpid(), SIGKILL);
    return what;
}

static void after(int how) {
    if (how == KILL_WITHIN || how == KILL_AFTER) syscall(SYS_kill, getpid(), SIGKILL);
}

static int fails(int how) {
    if (how != FAIL && how != FAIL_ON) return 0;
    errno = failure;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define SIMPLE(type, name, parameters, arguments, folder, path, changes) \
    type name parameters { \
        REAL(name); \
        int how = turn(#name, folder, path, changes); \
        if (fails(how)) return (type)-1; \
        type result = real arguments; \
        after(how); \
        return result; \
    }

/* Moves bytes: the chosen call may move half of them. */
#define MOVING(name, parameters, whole, half, descriptor, changes) \
    ssize_t name parameters { \
        REAL(name); \
        int how = turn(#name, descriptor, NULL, changes); \
        if (fails(how)) return -1; \
        ssize_t result = (how == SHORT || how == KILL_WITHIN) && count > 1 ? real half : real whole; \
        after(how); \
        return result; \
    }

MOVING(write, (int fd, const void *data, size_t count), (fd, data, count), (fd, data, count / 2), fd, 1)
MOVING(pwrite64, (int fd, const void *data, size_t count, off64_t at), (fd, data, count, at), (fd, data, count / 2, at), fd, 1)
MOVING(read, (int fd, void *data, size_t count), (fd, data, count), (fd, data, count / 2), fd, 0)
MOVING(pread64, (int fd, void *data, size_t count, off64_t at), (fd, data, count, at), (fd, data, count / 2, at), fd, 0)

ssize_t preadv64(int fd, const struct iovec *data, int count, off64_t at) {
    REAL(preadv64);
    int how = turn("preadv64", fd, NULL, 0);
    if (fails(how)) return -1;
    struct iovec half = {data[0].iov_base, data[0].iov_len > 1 ? data[0].iov_len / 2 : 1};
    ssize_t result = how == SHORT ? real(fd, &half, 1, at) : real(fd, data, count, at);
    after(how);
    return result;
}

SIMPLE(int, fsync, (int fd), (fd), fd, NULL, 1)
SIMPLE(int, fdatasync, (int fd), (fd), fd, NULL, 1)
SIMPLE(int, ftruncate64, (int fd, off64_t size), (fd, size), fd, NULL, 1)
SIMPLE(int, truncate64, (const char *path, off64_t size), (path, size), AT_FDCWD, path, 1)
SIMPLE(int, flock, (int fd, int operation), (fd, operation), fd, NULL, 0)
SIMPLE(int, rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
SIMPLE(int, unlink, (const char *path), (path), AT_FDCWD, path, 1)
SIMPLE(int, rmdir, (const char *path), (path), AT_FDCWD, path, 1)
SIMPLE(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 1)
SIMPLE(int, stat64, (const char *path, struct stat64 *out), (path, out), AT_FDCWD, path, 0)
SIMPLE(int, lstat64, (const char *path, struct stat64 *out), (path, out), AT_FDCWD, path, 0)
SIMPLE(int, fstat64, (int fd, struct stat64 *out), (fd, out), fd, NULL, 0)
SIMPLE(int, fstatat64, (int fd, const char *path, struct stat64 *out, int flags), (fd, path, out, flags), fd, path, 0)
SIMPLE(int, statvfs64, (const char *path, struct statvfs64 *out), (path, out), AT_FDCWD, path, 0)

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    REAL(renameat2);
    if (is_on && cannot_exchange) {
        errno = EINVAL;
        return -1;
    }
    int how = turn("renameat2", to_folder, to, 1);
    if (fails(how)) return -1;
    int result = real(from_folder, from, to_folder, to, flags);
    after(how);
    return result;
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    int how = turn("posix_fallocate64", fd, NULL, 1);
    if (fails(how)) return failure;
    int result = real(fd, at, size);
    after(how);
    return result;
}

DIR *opendir(const char *path) {
    REAL(opendir);
    int how = turn("opendir", AT_FDCWD, path, 0);
    if (fails(how)) return NULL;
    DIR *result = real(path);
    after(how);
    return result;
}

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    int how = turn("open64", AT_FDCWD, path, flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR));
    if (fails(how)) return -1;
    int result = real(path, flags, mode);
    after(how);
    return result;
}

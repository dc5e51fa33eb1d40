/* Preloaded into a process, lets calls of the C library on files below a folder fail as a disk in trouble does.

   LMKV_FAIL_BELOW names the folder, LMKV_FAIL_FILE a file of four ints, which the process may change at any time:
   the error (0: none), which calls have it (bits, as below), that every n-th of them has it, and how many had it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, PUBLISH = 16, UNLINK = 32, STAT = 64, LIST = 128, MAKE = 256 };

static volatile int *control;
static const char *below;
static int calls;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("LMKV_FAIL_FILE");
    int fd = file ? open(file, O_RDWR | O_CLOEXEC) : -1;
    below = getenv("LMKV_FAIL_BELOW");
    if (fd >= 0 && below) {
        void *map = mmap(NULL, 4 * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        control = map == MAP_FAILED ? NULL : map;
        close(fd);
    }
}

static int fails(int call, int fd, const char *path) {
    char link[64], place[PATH_MAX];
    if (!control || !control[0] || !(control[1] & call))
        return 0;
    if (!path || path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, place, sizeof place - 1);
        if (length < 0)
            return 0;
        place[length] = 0;
        path = place;
    }
    if (strncmp(path, below, strlen(below)) || __sync_add_and_fetch(&calls, 1) % control[2])
        return 0;
    __sync_add_and_fetch(&control[3], 1);
    errno = control[0];
    return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define CALL(type, name, call, fd, path, parameters, arguments, ...)                                                   \
    type name parameters { return fails(call, fd, path) ? (type)-1 : REAL(type, #name, __VA_ARGS__) arguments; }

#define OPENS(name)                                                                                                    \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, mode_t);                                                                            \
        va_end(more);                                                                                                  \
        return fails(OPEN, -1, path) ? -1 : REAL(int, #name, const char *, int, ...)(path, flags, mode);               \
    }
#define OPENS_AT(name)                                                                                                 \
    int name(int fd, const char *path, int flags, ...) {                                                               \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, mode_t);                                                                            \
        va_end(more);                                                                                                  \
        return fails(OPEN, fd, path) ? -1 : REAL(int, #name, int, const char *, int, ...)(fd, path, flags, mode);      \
    }
#define MOVES(name, call)                                                                                              \
    CALL(ssize_t, name, call, fd, NULL, (int fd, const struct iovec *parts, int count, off64_t at),                    \
         (fd, parts, count, at), int, const struct iovec *, int, off64_t)
#define MOVES2(name, call)                                                                                             \
    CALL(ssize_t, name, call, fd, NULL, (int fd, const struct iovec *parts, int count, off64_t at, int flags),         \
         (fd, parts, count, at, flags), int, const struct iovec *, int, off64_t, int)

OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64)
MOVES(preadv64, READ) MOVES(preadv, READ) MOVES2(preadv64v2, READ) MOVES2(preadv2, READ)
MOVES(pwritev64, WRITE) MOVES(pwritev, WRITE) MOVES2(pwritev64v2, WRITE) MOVES2(pwritev2, WRITE)
CALL(int, fsync, SYNC, fd, NULL, (int fd), (fd), int)
CALL(int, fdatasync, SYNC, fd, NULL, (int fd), (fd), int)
CALL(int, linkat, PUBLISH, fd, path, (int fd, const char *path, int to, const char *name, int flags),
     (fd, path, to, name, flags), int, const char *, int, const char *, int)
CALL(int, renameat, PUBLISH, fd, path, (int fd, const char *path, int to, const char *name), (fd, path, to, name),
     int, const char *, int, const char *)
CALL(int, unlinkat, UNLINK, fd, path, (int fd, const char *path, int flags), (fd, path, flags), int, const char *, int)
CALL(int, mkdirat, MAKE, fd, path, (int fd, const char *path, mode_t mode), (fd, path, mode), int, const char *, mode_t)
CALL(int, fstatat64, STAT, fd, path, (int fd, const char *path, struct stat64 *into, int flags),
     (fd, path, into, flags), int, const char *, struct stat64 *, int)
CALL(int, fstatat, STAT, fd, path, (int fd, const char *path, struct stat *into, int flags), (fd, path, into, flags),
     int, const char *, struct stat *, int)
CALL(int, fstat64, STAT, fd, NULL, (int fd, struct stat64 *into), (fd, into), int, struct stat64 *)
CALL(int, fstat, STAT, fd, NULL, (int fd, struct stat *into), (fd, into), int, struct stat *)
DIR *fdopendir(int fd) { return fails(LIST, fd, NULL) ? NULL : REAL(DIR *, "fdopendir", int)(fd); }
struct dirent64 *readdir64(DIR *folder) {
    return fails(LIST, dirfd(folder), NULL) ? NULL : REAL(struct dirent64 *, "readdir64", DIR *)(folder);
}
struct dirent *readdir(DIR *folder) {
    return fails(LIST, dirfd(folder), NULL) ? NULL : REAL(struct dirent *, "readdir", DIR *)(folder);
}

/* Fault injection: an LD_PRELOAD library that makes selected file calls of selected ranks fail, stall or halt.
 *
 * FAULT_RULES is the path of a rules file with one rule per line. A process reads it at its first file call, and a
 * forked child reads it again:
 *
 *     rank call pattern first hits action [argument]
 *     1 write *.tmp-*.bin 3 1 EIO
 *
 * rank:    RANK of the process (0 if it is unset), or *.
 * call:    open (for writing), read, write, fsync, rename, unlink, mkdir.
 * pattern: fnmatch pattern of the whole path; for a rename, of the old or the new path.
 * first:   the number of the first matching call to hit.
 * hits:    the number of calls to hit (0: all).
 * action:  EIO, ENOSPC, EROFS, EDQUOT: fail with this error.
 *          stall: wait <argument> seconds, then continue.
 *          park: halt before the call. half: write half of the bytes, then halt. after: make the call, then halt.
 *
 * A halted rank writes its pid to <rules>.parked.<rank> and continues when <rules>.go exists. Every hit adds a line
 * "rank call path" to <rules>.hits, so that tests can check that the fault occurred.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_RULES 32

struct rule {
  char rank[8], call[8], pattern[1024], action[8];
  int first, hits, seen;
  double seconds;
};

static struct rule rules[MOST_RULES];
static int num_rules = -1; /* -1: not read yet */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void forget(void) {
  num_rules = -1;
  pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, forget); }

/* This library accesses its files only with system calls, which do not go through the wrappers below. */
static int raw_open(const char *path, int flags) { return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0644); }

static void read_rules(void) {
  static char text[65536];
  const char *path = getenv("FAULT_RULES");
  num_rules = 0;
  int fd = path ? raw_open(path, O_RDONLY) : -1;
  if (fd < 0) return;
  long size = syscall(SYS_read, fd, text, sizeof text - 1);
  syscall(SYS_close, fd);
  text[size > 0 ? size : 0] = 0;
  char *rest = text, *line;
  while ((line = strsep(&rest, "\n")) && num_rules < MOST_RULES) {
    struct rule *r = &rules[num_rules];
    r->seen = 0;
    r->seconds = 0;
    if (sscanf(line, "%7s %7s %1023s %d %d %7s %lf", r->rank, r->call, r->pattern, &r->first, &r->hits, r->action,
               &r->seconds) >= 6)
      num_rules++;
  }
}

static const char *rank(void) {
  const char *value = getenv("RANK");
  return value ? value : "0";
}

static void note(const char *suffix, int flags, const char *line) {
  char path[2048];
  snprintf(path, sizeof path, "%s.%s", getenv("FAULT_RULES"), suffix);
  int fd = raw_open(path, O_WRONLY | O_CREAT | flags);
  if (fd >= 0) {
    syscall(SYS_write, fd, line, strlen(line));
    syscall(SYS_close, fd);
  }
}

static void wait_seconds(double seconds) {
  struct timespec left = {(time_t)seconds, (long)((seconds - (long)seconds) * 1e9)};
  while (nanosleep(&left, &left) && errno == EINTR) {
  }
}

static void park(void) {
  char line[64], go[2048], suffix[32];
  snprintf(line, sizeof line, "%d\n", (int)getpid());
  snprintf(suffix, sizeof suffix, "parked.%s", rank());
  note(suffix, O_TRUNC, line);
  snprintf(go, sizeof go, "%s.go", getenv("FAULT_RULES"));
  struct stat found;
  while (syscall(SYS_newfstatat, AT_FDCWD, go, &found, 0)) wait_seconds(0.002);
}

/* The rule that hits this call, or NULL. */
static struct rule *hit(const char *call, const char *path, const char *other) {
  struct rule *found = NULL;
  int kept = errno;
  pthread_mutex_lock(&lock);
  if (num_rules < 0) read_rules();
  for (int i = 0; i < num_rules && !found; i++) {
    struct rule *r = &rules[i];
    if (strcmp(r->call, call) || (strcmp(r->rank, "*") && strcmp(r->rank, rank()))) continue;
    if (fnmatch(r->pattern, path, 0) && (!other || fnmatch(r->pattern, other, 0))) continue;
    int number = ++r->seen;
    if (number >= r->first && (r->hits == 0 || number < r->first + r->hits)) found = r;
  }
  pthread_mutex_unlock(&lock);
  if (found) {
    char line[4096];
    snprintf(line, sizeof line, "%s %s %s\n", rank(), call, path);
    note("hits", O_APPEND, line);
  }
  errno = kept;
  return found;
}

/* Act before the call. Return 0, or the errno with which the call fails. */
static int before(struct rule *r) {
  if (!r) return 0;
  if (!strcmp(r->action, "EIO")) return EIO;
  if (!strcmp(r->action, "ENOSPC")) return ENOSPC;
  if (!strcmp(r->action, "EROFS")) return EROFS;
  if (!strcmp(r->action, "EDQUOT")) return EDQUOT;
  if (!strcmp(r->action, "stall")) wait_seconds(r->seconds);
  if (!strcmp(r->action, "park")) park();
  return 0;
}

static void after(struct rule *r) {
  int kept = errno;
  if (r && !strcmp(r->action, "after")) park();
  errno = kept;
}

static void path_of(int fd, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, size - 1);
  path[length > 0 ? length : 0] = 0;
}

/* The full path of `name`, which may be relative to an open directory (as in shutil.rmtree). */
static const char *whole(int directory, const char *name, char *path, size_t size) {
  if (name[0] == '/') return name;
  if (directory == AT_FDCWD) {
    if (syscall(SYS_getcwd, path, size) < 0) path[0] = 0;
  } else {
    path_of(directory, path, size);
  }
  size_t length = strlen(path);
  snprintf(path + length, size - length, "/%s", name);
  return path;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* The body of every wrapper: a rule may fail the call, or act before or after it. */
#define GUARDED(type, call_name, path, other, failed, real)   \
  do {                                                        \
    struct rule *r_ = hit(call_name, path, other);            \
    int error_ = before(r_);                                  \
    if (error_) {                                             \
      errno = error_;                                         \
      return failed;                                          \
    }                                                         \
    type result_ = real;                                      \
    after(r_);                                                \
    return result_;                                           \
  } while (0)

static int is_writing(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT); }

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

#define OPEN(name)                                                                            \
  int name(const char *file, int flags, ...) {                                                \
    char path[4096];                                                                          \
    va_list more;                                                                             \
    va_start(more, flags);                                                                    \
    mode_t mode = mode_of(flags, more);                                                       \
    va_end(more);                                                                             \
    if (!is_writing(flags)) return NEXT(name)(file, flags, mode);                             \
    GUARDED(int, "open", whole(AT_FDCWD, file, path, sizeof path), NULL, -1, NEXT(name)(file, flags, mode)); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                          \
  int name(int directory, const char *file, int flags, ...) {                                 \
    char path[4096];                                                                          \
    va_list more;                                                                             \
    va_start(more, flags);                                                                    \
    mode_t mode = mode_of(flags, more);                                                       \
    va_end(more);                                                                             \
    if (!is_writing(flags)) return NEXT(name)(directory, file, flags, mode);                  \
    GUARDED(int, "open", whole(directory, file, path, sizeof path), NULL, -1,                 \
            NEXT(name)(directory, file, flags, mode));                                        \
  }
OPENAT(openat)
OPENAT(openat64)

#define CREAT(name)                                                                           \
  int name(const char *file, mode_t mode) {                                                   \
    char path[4096];                                                                          \
    GUARDED(int, "open", whole(AT_FDCWD, file, path, sizeof path), NULL, -1, NEXT(name)(file, mode)); \
  }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name) /* C++ streams open files with it, then call write */                     \
  FILE *name(const char *file, const char *mode) {                                            \
    char path[4096];                                                                          \
    if (!strpbrk(mode, "wa+")) return NEXT(name)(file, mode);                                 \
    GUARDED(FILE *, "open", whole(AT_FDCWD, file, path, sizeof path), NULL, NULL, NEXT(name)(file, mode)); \
  }
FOPEN(fopen)
FOPEN(fopen64)

/* A write may also halt after half of its bytes, which leaves an incomplete file. */
#define WRITE(name, parameters, real, real_half)                                              \
  ssize_t name parameters {                                                                   \
    char path[4096];                                                                          \
    path_of(fd, path, sizeof path);                                                           \
    struct rule *r = hit("write", path, NULL);                                                \
    int error = before(r);                                                                    \
    if (error) {                                                                              \
      errno = error;                                                                          \
      return -1;                                                                              \
    }                                                                                         \
    if (r && !strcmp(r->action, "half")) {                                                    \
      ssize_t written = real_half;                                                            \
      park();                                                                                 \
      return written;                                                                         \
    }                                                                                         \
    ssize_t result = real;                                                                    \
    after(r);                                                                                 \
    return result;                                                                            \
  }
WRITE(write, (int fd, const void *data, size_t size), NEXT(write)(fd, data, size),
      NEXT(write)(fd, data, (size + 1) / 2))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t place), NEXT(pwrite)(fd, data, size, place),
      NEXT(pwrite)(fd, data, (size + 1) / 2, place))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t place), NEXT(pwrite64)(fd, data, size, place),
      NEXT(pwrite64)(fd, data, (size + 1) / 2, place))
WRITE(writev, (int fd, const struct iovec *parts, int count), NEXT(writev)(fd, parts, count),
      NEXT(writev)(fd, parts, (count + 1) / 2))

#define READ(name, parameters, real)                                                          \
  ssize_t name parameters {                                                                   \
    char path[4096];                                                                          \
    path_of(fd, path, sizeof path);                                                           \
    GUARDED(ssize_t, "read", path, NULL, -1, real);                                           \
  }
READ(read, (int fd, void *data, size_t size), NEXT(read)(fd, data, size))
READ(pread, (int fd, void *data, size_t size, off_t place), NEXT(pread)(fd, data, size, place))
READ(pread64, (int fd, void *data, size_t size, off64_t place), NEXT(pread64)(fd, data, size, place))
READ(preadv, (int fd, const struct iovec *parts, int count, off_t place), NEXT(preadv)(fd, parts, count, place))
READ(preadv64, (int fd, const struct iovec *parts, int count, off64_t place), NEXT(preadv64)(fd, parts, count, place))

#define SYNC(name)                                                                            \
  int name(int fd) {                                                                          \
    char path[4096];                                                                          \
    path_of(fd, path, sizeof path);                                                           \
    GUARDED(int, "fsync", path, NULL, -1, NEXT(name)(fd));                                    \
  }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
  char old[4096], new[4096];
  GUARDED(int, "rename", whole(AT_FDCWD, from, old, sizeof old), whole(AT_FDCWD, to, new, sizeof new), -1,
          NEXT(rename)(from, to));
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
  char old[4096], new[4096];
  GUARDED(int, "rename", whole(from_directory, from, old, sizeof old), whole(to_directory, to, new, sizeof new), -1,
          NEXT(renameat)(from_directory, from, to_directory, to));
}

int unlink(const char *file) {
  char path[4096];
  GUARDED(int, "unlink", whole(AT_FDCWD, file, path, sizeof path), NULL, -1, NEXT(unlink)(file));
}

int unlinkat(int directory, const char *file, int flags) {
  char path[4096];
  GUARDED(int, "unlink", whole(directory, file, path, sizeof path), NULL, -1, NEXT(unlinkat)(directory, file, flags));
}

int rmdir(const char *file) {
  char path[4096];
  GUARDED(int, "unlink", whole(AT_FDCWD, file, path, sizeof path), NULL, -1, NEXT(rmdir)(file));
}

int mkdir(const char *file, mode_t mode) {
  char path[4096];
  GUARDED(int, "mkdir", whole(AT_FDCWD, file, path, sizeof path), NULL, -1, NEXT(mkdir)(file, mode));
}

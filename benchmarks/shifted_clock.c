/* For benchmarks/faults.py: a wall clock that is ahead by the seconds in $SHIFTED_CLOCK, which may change at any time.
   Preloaded; monotonic clocks stay true. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    FILE *file = path ? fopen(path, "re") : NULL;
    long seconds = 0;
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (code == 0 && id == CLOCK_REALTIME) now->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (at) *at = precise.tv_sec;
    return precise.tv_sec;
}

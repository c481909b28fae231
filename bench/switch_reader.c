/* Looks at files of the running overlay without a pause, and says at the end how often one was missing and for how long.
 *
 * Each line it prints is one look: its name, how often, how often ENOENT, how often another error, the longest gap in
 * microseconds. SIGTERM ends it. The set has two versions, a and b; `still` and the directory are in both. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BOTH, STILL, FOLDER, OPT, MARK, BASE, EITHER, LOOKS };
static const char *NAMES[LOOKS] = {"both", "still", "folder", "opt", "mark", "base", "either"};
static unsigned long looked[LOOKS], missing[LOOKS], failed[LOOKS];
static double since[LOOKS], longest[LOOKS];
static volatile sig_atomic_t ended;

static void end(int number) {
    (void)number;
    ended = 1;
}

static double now_us(void) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return moment.tv_sec * 1e6 + moment.tv_nsec / 1e3;
}

static void count(int look, int found) {
    looked[look]++;
    if (!found) {
        if (errno == ENOENT) missing[look]++;
        else failed[look]++;
        if (since[look] == 0) since[look] = now_us();
    } else if (since[look] != 0) {
        double gap = now_us() - since[look];
        if (gap > longest[look]) longest[look] = gap;
        since[look] = 0;
    }
}

static int there(const char *path) {
    struct stat found;
    return stat(path, &found) == 0;
}

static int first(const char *path, char *byte) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return 0;
    ssize_t got = read(descriptor, byte, 1);
    int code = errno;
    close(descriptor);
    errno = code;
    return got == 1;
}

int main(void) {
    char byte = 0, before = 0;
    unsigned long flips = 0, wrong = 0;
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    while (!ended) {
        int found = first("/usr/share/gap/both", &byte);
        count(BOTH, found);
        if (found) {
            if (byte != 'a' && byte != 'b') wrong++;
            if (before && byte != before) flips++;
            before = byte;
        }
        count(STILL, there("/usr/share/gap/still"));
        count(FOLDER, there("/usr/share/gap"));
        count(OPT, first("/opt/gap/version", &byte));
        count(MARK, there("/usr/.systemd-sysext/dev"));
        count(BASE, there("/usr/bin/true"));
        /* One of the two versions is always whole: a, b and a again, since the switch may come in between. */
        count(EITHER, there("/usr/share/gap/only-a") || there("/usr/share/gap/only-b") || there("/usr/share/gap/only-a"));
    }
    for (int look = 0; look < LOOKS; look++)
        printf("%s %lu %lu %lu %.0f\n", NAMES[look], looked[look], missing[look], failed[look], longest[look]);
    printf("flips %lu %lu 0 0\n", flips, wrong);
    return 0;
}

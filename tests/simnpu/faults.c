#define _GNU_SOURCE
#include "simnpu.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void sleep_us(long us) {
    struct timespec left = {us / 1000000, us % 1000000 * 1000L};
    while (nanosleep(&left, &left) && errno == EINTR) { }
}

/* Like a driver waiting for an interrupt that never comes: a signal handler runs, then the wait goes on. */
static void hang(const Options *options, const char *where) {
    log_line(options, "hang %s", where);
    for (;;) sleep_us(1000000);
}

static void spin(const Options *options) {
    log_line(options, "spin");
    for (volatile unsigned long turn = 0;; turn++) { }
}

static void read_mode(const Options *options, Stage stage, char mode[TEXT_LIMIT]) {
    snprintf(mode, TEXT_LIMIT, "%s", stage == STAGE_FRAME ? options->mode : options->fail);
    if (!options->control[0]) return;
    int fd = open(options->control, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    char text[TEXT_LIMIT];
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return;
    text[length] = 0;
    text[strcspn(text, "\r\n")] = 0;
    if (text[0]) snprintf(mode, TEXT_LIMIT, "%s", text);
}

static Fault at_load(const Options *options, Stage stage, const char *mode) {
    if (stage == STAGE_CREATE) {
        if (!strcmp(mode, "create_hang")) hang(options, "at create");
        if (!strcmp(mode, "busy")) return FAULT_BUSY;
        return strcmp(mode, "create") ? FAULT_NONE : FAULT_REFUSE;
    }
    if (!strcmp(mode, "prepare_hang")) hang(options, "at prepare");
    return strcmp(mode, "prepare") ? FAULT_NONE : FAULT_REFUSE;
}

static Fault at_frame(const Options *options, const char *mode, long frame) {
    if (options->hang_at && frame >= options->hang_at) hang(options, "at frame");
    if (!strcmp(mode, "hang")) hang(options, "at frame");
    if (!strcmp(mode, "spin")) spin(options);
    if (!strcmp(mode, "crash")) raise(SIGSEGV);
    if (!strcmp(mode, "abort")) abort();
    if (!strncmp(mode, "slow:", 5)) sleep_us(atol(mode + 5) * 1000);
    if (!strcmp(mode, "error")) return FAULT_ERROR;
    return strcmp(mode, "wrong") ? FAULT_NONE : FAULT_WRONG;
}

Fault misbehave(const Options *options, Stage stage, long frame) {
    char mode[TEXT_LIMIT];
    read_mode(options, stage, mode);
    return stage == STAGE_FRAME ? at_frame(options, mode, frame) : at_load(options, stage, mode);
}

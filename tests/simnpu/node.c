#define _GNU_SOURCE
#include "simnpu.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A context is a one-byte write lock on the node, owned by the open file description: the kernel gives it back when the
 * last descriptor goes, also when its process was killed, and grants no more than `contexts` of them to all processes
 * together. The node is a null device, since a real one needs a driver; locks work on any inode. */
int take_context(const Options *options, char error[TEXT_LIMIT]) {
    int fd = open(options->node, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        snprintf(error, TEXT_LIMIT, "simnpu: cannot open %.300s: %s", options->node, strerror(errno));
        return -1;
    }
    for (int slot = 0; slot < options->contexts; slot++) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
        if (!fcntl(fd, F_OFD_SETLK, &lock)) {
            log_line(options, "context %d of %d taken", slot + 1, options->contexts);
            return fd;
        }
        if (errno != EAGAIN && errno != EACCES) break;
    }
    int cause = errno == EAGAIN || errno == EACCES ? EBUSY : errno;
    snprintf(error, TEXT_LIMIT, "simnpu: cannot get a context on %.300s: %s (it grants %d)", options->node, strerror(cause),
             options->contexts);
    close(fd);
    return -1;
}

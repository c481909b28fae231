/* A simulated NPU: a TensorFlow Lite external delegate that computes int8 operators exactly as the reference kernels
 * do, grants a limited number of contexts on its device node, compiles on the first invoke, and misbehaves on demand.
 *
 *   options.c   the options an application passes, all of them strings
 *   node.c      the device node and its contexts
 *   faults.c    the misbehaviour
 *   kernels.c   the arithmetic
 *   delegate.c  what it claims, and the calls the runtime makes */
#pragma once
#include "abi.h"

#define SIMNPU_VERSION "1.0.0"
#define TEXT_LIMIT 512

typedef struct {
    bool claim[OP_LIMIT];
    int max_nodes;               /* 0: no limit */
    char node[TEXT_LIMIT];       /* device node; empty: none is opened */
    int contexts;                /* how many holders the node grants at once */
    char control[TEXT_LIMIT];    /* file whose first line is the mode; read at create, at prepare and at every frame */
    char mode[TEXT_LIMIT];       /* the mode where the control file is absent or empty */
    char fail[TEXT_LIMIT];       /* like mode, for create and prepare */
    char cache[TEXT_LIMIT];      /* compiled models, one key a line */
    char log[TEXT_LIMIT];
    long hang_at;                /* the frame, counted from 1, from which on it hangs; 0: never */
    long warmup_ms;              /* how long a model that is not in the cache compiles */
    long latency_us;             /* added to every frame */
} Options;

/* NULL, or what is wrong, in `error`. */
const char *parse_options(Options *options, char **keys, char **values, size_t count, char error[TEXT_LIMIT]);
const char *operator_name(int builtin_code);
void log_line(const Options *options, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Open the node and take one of its contexts. Returns the descriptor, or -1 and says why in `error`. */
int take_context(const Options *options, char error[TEXT_LIMIT]);

typedef enum { STAGE_CREATE, STAGE_PREPARE, STAGE_FRAME } Stage;
typedef enum { FAULT_NONE, FAULT_REFUSE, FAULT_BUSY, FAULT_ERROR, FAULT_WRONG } Fault;

/* Read the mode and act on it: does not return from hang, spin, crash and abort; returns what the caller must do. */
Fault misbehave(const Options *options, Stage stage, long frame);
void sleep_us(long us);

typedef struct {
    int op;
    const Tensor **in;
    int in_count;
    Tensor *out;
    const void *params;
    const void **in_data; /* where the values are: the runtime's arena, or a buffer of the partition */
    void *out_data;
} Operation;

/* NULL when the operator can be computed here, or the reason why not. */
const char *unsupported(const Context *context, const Node *node, int op);
void compute(const Operation *operation);

#define _GNU_SOURCE
#include "simnpu.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    Delegate interface; /* first, so that the runtime's pointer is also ours */
    Options options;
    int context_fd;
    int partitions;
    uint64_t key; /* of everything claimed; names the compiled model in the cache */
    long frames;
    Fault fault; /* of the frame in progress */
} Npu;

/* One run of claimed nodes that the runtime hands us as a single node. */
typedef struct {
    Npu *npu;
    bool first; /* a frame begins when the first partition runs */
    int count;
    Operation *operations;
    int *out_tensor; /* index of each operation's output */
    int **in_tensor;
    void **buffers; /* one an index, for tensors that live only inside the partition */
    size_t buffer_count;
} Partition;

/* ---- compiling ---- */

static uint64_t mix(uint64_t key, const void *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) key = (key ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u; /* FNV-1a */
    return key;
}

static uint64_t mix_tensor(uint64_t key, const Tensor *t) {
    key = mix(key, t->dims->data, sizeof(int) * (size_t)t->dims->size);
    key = mix(key, &t->params.scale, sizeof t->params.scale);
    key = mix(key, &t->params.zero_point, sizeof t->params.zero_point);
    return t->allocation_type == ALLOCATION_MMAP_RO ? mix(key, t->data.raw, t->bytes) : key;
}

static bool in_cache(const char *path, const char *key) {
    FILE *file = fopen(path, "re");
    if (!file) return false;
    char line[64];
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) found = !strncmp(line, key, 16);
    fclose(file);
    return found;
}

/* As the vendors' delegates do, on the first invoke and not at load: the one long call of a model's life. */
static void compile(const Npu *npu) {
    const Options *o = &npu->options;
    char key[32];
    snprintf(key, sizeof key, "%016" PRIx64 "\n", npu->key);
    if (o->cache[0] && in_cache(o->cache, key)) {
        log_line(o, "compile: cached %.16s", key);
        return;
    }
    log_line(o, "compile: %ld ms %.16s", o->warmup_ms, key);
    sleep_us(o->warmup_ms * 1000);
    if (!o->cache[0]) return;
    int fd = open(o->cache, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, key, strlen(key)) < 0) log_line(o, "compile: cannot write the cache");
    if (fd >= 0) close(fd);
}

/* ---- a partition's life ---- */

static bool leaves(const DelegateParams *params, int tensor) {
    for (int i = 0; i < params->output_tensors->size; i++)
        if (params->output_tensors->data[i] == tensor) return true;
    return false;
}

static void adopt(Partition *p, Context *context, const DelegateParams *params, int at) {
    Node *node;
    Registration *registration;
    context->GetNodeAndRegistration(context, params->nodes_to_replace->data[at], &node, &registration);
    Operation *o = &p->operations[at];
    o->op = registration->builtin_code;
    o->params = node->builtin_data;
    p->npu->key = mix(p->npu->key, &o->op, sizeof o->op);
    o->in = calloc((size_t)node->inputs->size, sizeof *o->in);
    o->in_data = calloc((size_t)node->inputs->size, sizeof *o->in_data);
    p->in_tensor[at] = node->inputs->data;
    for (int i = 0; i < node->inputs->size && node->inputs->data[i] >= 0; i++, o->in_count++)
        p->npu->key = mix_tensor(p->npu->key, &context->tensors[node->inputs->data[i]]);
    int out = p->out_tensor[at] = node->outputs->data[0];
    p->npu->key = mix_tensor(p->npu->key, &context->tensors[out]);
    if (!leaves(params, out)) p->buffers[out] = malloc(context->tensors[out].bytes);
}

static void *partition_init(Context *context, const char *buffer, size_t length) {
    (void)length;
    const DelegateParams *params = (const void *)buffer;
    Partition *p = calloc(1, sizeof *p);
    p->npu = params->delegate->data_;
    p->first = p->npu->partitions++ == 0;
    p->count = params->nodes_to_replace->size;
    p->buffer_count = context->tensors_size;
    p->operations = calloc((size_t)p->count, sizeof *p->operations);
    p->out_tensor = calloc((size_t)p->count, sizeof *p->out_tensor);
    p->in_tensor = calloc((size_t)p->count, sizeof *p->in_tensor);
    p->buffers = calloc(p->buffer_count, sizeof *p->buffers);
    for (int i = 0; i < p->count; i++) adopt(p, context, params, i);
    log_line(&p->npu->options, "partition %d: %d nodes", p->npu->partitions, p->count);
    return p;
}

static void partition_free(Context *context, void *data) {
    (void)context;
    Partition *p = data;
    if (!p) return;
    for (size_t i = 0; i < p->buffer_count; i++) free(p->buffers[i]);
    for (int i = 0; i < p->count; i++) {
        free(p->operations[i].in);
        free(p->operations[i].in_data);
    }
    free(p->operations);
    free(p->out_tensor);
    free(p->in_tensor);
    free(p->buffers);
    free(p);
}

static Status partition_prepare(Context *context, Node *node) {
    (void)context;
    (void)node;
    return STATUS_OK;
}

/* The runtime may move its arena between invokes, so addresses are looked up each time. */
static void bind(Partition *p, Context *context, int at) {
    Operation *o = &p->operations[at];
    for (int i = 0; i < o->in_count; i++) {
        int tensor = p->in_tensor[at][i];
        o->in[i] = &context->tensors[tensor];
        o->in_data[i] = p->buffers[tensor] ? p->buffers[tensor] : context->tensors[tensor].data.raw;
    }
    int out = p->out_tensor[at];
    o->out = &context->tensors[out];
    o->out_data = p->buffers[out] ? p->buffers[out] : o->out->data.raw;
}

static void lie(Context *context, const Node *node, unsigned seed) {
    for (int i = 0; i < node->outputs->size; i++) {
        Tensor *t = &context->tensors[node->outputs->data[i]];
        for (size_t b = 0; b < t->bytes; b++) {
            seed = seed * 1664525u + 1013904223u;
            t->data.u8[b] = (uint8_t)(seed >> 24);
        }
    }
}

static Status partition_invoke(Context *context, Node *node) {
    Partition *p = node->user_data;
    Npu *npu = p->npu;
    if (p->first) {
        if (npu->frames++ == 0 && npu->options.warmup_ms) compile(npu);
        sleep_us(npu->options.latency_us);
        npu->fault = misbehave(&npu->options, STAGE_FRAME, npu->frames);
    }
    if (npu->fault == FAULT_ERROR) {
        context->ReportError(context, "simnpu: the graph returned -1 (simulated)");
        return STATUS_ERROR;
    }
    for (int i = 0; i < p->count; i++) {
        bind(p, context, i);
        compute(&p->operations[i]);
    }
    if (npu->fault == FAULT_WRONG) lie(context, node, (unsigned)npu->frames);
    return STATUS_OK;
}

/* ---- claiming ---- */

static IntArray *claim(Npu *npu, Context *context, const IntArray *plan) {
    IntArray *claimed = malloc(sizeof *claimed + sizeof(int) * (size_t)plan->size);
    claimed->size = 0;
    for (int i = 0; i < plan->size; i++) {
        Node *node;
        Registration *registration;
        if (context->GetNodeAndRegistration(context, plan->data[i], &node, &registration)) continue;
        int op = registration->builtin_code;
        if (op < 0 || op >= OP_LIMIT || !npu->options.claim[op]) continue;
        const char *reason = unsupported(context, node, op);
        if (!reason && npu->options.max_nodes && claimed->size >= npu->options.max_nodes) reason = "max_nodes is reached";
        if (reason) log_line(&npu->options, "refused %s %d: %s", operator_name(op), plan->data[i], reason);
        else claimed->data[claimed->size++] = plan->data[i];
    }
    return claimed;
}

static Status delegate_prepare(Context *context, Delegate *delegate) {
    Npu *npu = delegate->data_;
    npu->partitions = 0;
    npu->key = 0xcbf29ce484222325u;
    if (misbehave(&npu->options, STAGE_PREPARE, 0) == FAULT_REFUSE) {
        context->ReportError(context, "simnpu: the graph was refused (simulated)");
        return STATUS_DELEGATE_ERROR;
    }
    IntArray *plan;
    if (context->GetExecutionPlan(context, &plan)) return STATUS_ERROR;
    IntArray *claimed = claim(npu, context, plan);
    Registration kernel = {
        .init = partition_init,
        .free = partition_free,
        .prepare = partition_prepare,
        .invoke = partition_invoke,
        .builtin_code = OP_DELEGATE,
        .custom_name = "SimulatedNpu",
        .version = 1,
    };
    int total = plan->size; /* replacing nodes frees the plan */
    Status status = context->ReplaceNodeSubsetsWithDelegateKernels(context, kernel, claimed, delegate);
    log_line(&npu->options, "prepare: %d of %d nodes in %d partitions", claimed->size, total, npu->partitions);
    free(claimed);
    return status;
}

/* ---- what the runtime, and the service before it, look up by name ---- */

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *simnpu_version(void) { return SIMNPU_VERSION; }

EXPORT Delegate *tflite_plugin_create_delegate(char **keys, char **values, size_t count, void (*report)(const char *)) {
    char error[TEXT_LIMIT] = "";
    Npu *npu = calloc(1, sizeof *npu);
    npu->context_fd = -1;
    bool good = !parse_options(&npu->options, keys, values, count, error);
    Fault fault = good ? misbehave(&npu->options, STAGE_CREATE, 0) : FAULT_NONE;
    if (fault == FAULT_REFUSE) snprintf(error, sizeof error, "simnpu: the device did not answer (simulated)");
    if (fault == FAULT_BUSY) snprintf(error, sizeof error, "simnpu: cannot get a context: Device or resource busy (simulated)");
    good = good && fault == FAULT_NONE;
    if (good && npu->options.node[0]) good = (npu->context_fd = take_context(&npu->options, error)) >= 0;
    if (!good) {
        log_line(&npu->options, "create failed: %s", error);
        if (report) report(error);
        free(npu);
        return NULL;
    }
    npu->interface.data_ = npu;
    npu->interface.Prepare = delegate_prepare;
    return &npu->interface;
}

EXPORT void tflite_plugin_destroy_delegate(Delegate *delegate) {
    if (!delegate) return; /* Python's Delegate.__del__ hands us NULL after a failed create */
    Npu *npu = delegate->data_;
    log_line(&npu->options, "destroy");
    if (npu->context_fd >= 0) close(npu->context_fd);
    free(npu);
}

#define _GNU_SOURCE
#include "simnpu.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct { int op; const char *name; } OPERATORS[] = {
    {OP_ADD, "ADD"},           {OP_CONV_2D, "CONV_2D"},   {OP_DEPTHWISE_CONV_2D, "DEPTHWISE_CONV_2D"},
    {OP_LOGISTIC, "LOGISTIC"}, {OP_QUANTIZE, "QUANTIZE"}, {OP_RESIZE_BILINEAR, "RESIZE_BILINEAR"},
    {OP_RESHAPE, "RESHAPE"},
};
#define OPERATOR_COUNT (sizeof OPERATORS / sizeof *OPERATORS)

const char *operator_name(int builtin_code) {
    for (size_t i = 0; i < OPERATOR_COUNT; i++)
        if (OPERATORS[i].op == builtin_code) return OPERATORS[i].name;
    return "?";
}

static bool claim_operators(Options *options, const char *list, char error[TEXT_LIMIT]) {
    memset(options->claim, 0, sizeof options->claim);
    char *copy = strdup(list), *rest = copy;
    bool good = true;
    for (char *name; good && (name = strsep(&rest, ","));) {
        if (!*name) continue;
        good = false;
        for (size_t i = 0; i < OPERATOR_COUNT; i++)
            if (!strcmp(name, OPERATORS[i].name)) good = options->claim[OPERATORS[i].op] = true;
        if (!good) snprintf(error, TEXT_LIMIT, "simnpu: cannot claim operator '%s': it is not one of ours", name);
    }
    free(copy);
    return good;
}

static bool parse_number(const char *key, const char *text, long least, long *out, char error[TEXT_LIMIT]) {
    char *end;
    errno = 0;
    *out = strtol(text, &end, 10);
    if (!errno && end != text && !*end && *out >= least) return true;
    snprintf(error, TEXT_LIMIT, "simnpu: option %s needs a number of at least %ld, not '%s'", key, least, text);
    return false;
}

static bool parse_text(const char *key, const char *text, char out[TEXT_LIMIT], char error[TEXT_LIMIT]) {
    if (snprintf(out, TEXT_LIMIT, "%s", text) < TEXT_LIMIT) return true;
    snprintf(error, TEXT_LIMIT, "simnpu: option %s is longer than %d bytes", key, TEXT_LIMIT - 1);
    return false;
}

static bool parse_option(Options *o, const char *key, const char *value, char error[TEXT_LIMIT]) {
    const struct { const char *key; char *text; } texts[] = {
        {"node", o->node}, {"control", o->control}, {"mode", o->mode}, {"fail", o->fail}, {"cache", o->cache}, {"log", o->log},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!strcmp(key, texts[i].key)) return parse_text(key, value, texts[i].text, error);
    if (!strcmp(key, "ops")) return claim_operators(o, value, error);
    if (!strcmp(key, "hang_at")) return parse_number(key, value, 0, &o->hang_at, error);
    if (!strcmp(key, "warmup_ms")) return parse_number(key, value, 0, &o->warmup_ms, error);
    if (!strcmp(key, "latency_us")) return parse_number(key, value, 0, &o->latency_us, error);
    long number;
    if (!strcmp(key, "max_nodes")) return parse_number(key, value, 0, &number, error) && (o->max_nodes = (int)number, true);
    if (!strcmp(key, "contexts")) return parse_number(key, value, 1, &number, error) && (o->contexts = (int)number, true);
    snprintf(error, TEXT_LIMIT, "simnpu: unknown option '%s'", key);
    return false;
}

const char *parse_options(Options *options, char **keys, char **values, size_t count, char error[TEXT_LIMIT]) {
    memset(options, 0, sizeof *options);
    options->contexts = 1;
    options->claim[OP_CONV_2D] = options->claim[OP_DEPTHWISE_CONV_2D] = options->claim[OP_ADD] = true;
    for (size_t i = 0; i < count; i++)
        if (!parse_option(options, keys[i], values[i], error)) return error;
    return NULL;
}

void log_line(const Options *options, const char *format, ...) {
    if (!options->log[0]) return;
    char line[TEXT_LIMIT];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    int fd = open(options->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return;
    /* One write a line, so that two processes do not mix theirs; a lost line is not worth a failed inference. */
    if (write(fd, line, (size_t)length) < 0) { }
    close(fd);
}

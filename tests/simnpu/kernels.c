/* The reference kernels' arithmetic, bit for bit: gemmlowp's fixed-point multiplication with its two roundings, and
 * the same order of clamping. Where a sum is rearranged (the zero point taken out of the inner loop) it is a sum of
 * integers that fits 32 bits, so the order does not show. */
#define _GNU_SOURCE
#include "simnpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Baseline x86-64 has no wide integer multiply; the loader picks the second version where the CPU has one. */
#if defined(__x86_64__)
#define HOT __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define HOT __attribute__((optimize("O3")))
#endif

/* A real factor as multiplier * 2^(left - right) / 2^31. */
typedef struct { int32_t multiplier; int left, right; int32_t half; } FixedPoint;

static FixedPoint fixed_point(double real) {
    int exponent = 0;
    int64_t multiplier = (int64_t)round(frexp(real, &exponent) * (1LL << 31));
    if (multiplier == 1LL << 31) {
        multiplier /= 2;
        exponent++;
    }
    if (exponent < -31) multiplier = exponent = 0;
    FixedPoint f = {(int32_t)multiplier, exponent > 0 ? exponent : 0, exponent > 0 ? 0 : -exponent, 0};
    f.half = f.right ? 1 << (f.right - 1) : 0;
    return f;
}

/* gemmlowp's SaturatingRoundingDoublingHighMul, then its RoundingDivideByPOT. Their branches on the sign are gone:
 * truncating (p + 1 - 2^30) / 2^31 for a negative p is the floor of (p + 2^30) / 2^31, as for a positive one; and a
 * multiplier is never negative, so nothing saturates. */
static inline int32_t scale_by(int32_t x, FixedPoint f) {
    int32_t high = (int32_t)(((int64_t)(x * (1 << f.left)) * f.multiplier + (1LL << 30)) >> 31);
    return (int32_t)(((int64_t)high + f.half - (f.right ? high < 0 : 0)) >> f.right);
}

static inline int8_t clamp(int32_t value, int low, int high) {
    return (int8_t)(value < low ? low : value > high ? high : value);
}

static void activation_range(int activation, const Tensor *out, int *low, int *high) {
    float least = activation == ACTIVATION_RELU_N1_TO_1 ? -1.f : 0.f;
    float most = activation == ACTIVATION_RELU6 ? 6.f : 1.f;
    *low = -128;
    *high = 127;
    if (activation == ACTIVATION_NONE) return;
    int code = out->params.zero_point + (int)roundf(least / out->params.scale);
    if (code > *low) *low = code;
    if (activation == ACTIVATION_RELU) return;
    code = out->params.zero_point + (int)roundf(most / out->params.scale);
    if (code < *high) *high = code;
}

static int padding_before(int padding, int in, int out, int kernel, int stride, int dilation) {
    if (padding != PADDING_SAME) return 0;
    int total = (out - 1) * stride + (kernel - 1) * dilation + 1 - in;
    return total > 0 ? total / 2 : 0;
}

/* ---- convolutions ---- */

typedef struct {
    int in_h, in_w, in_c, out_h, out_w, out_c, kernel_h, kernel_w;
    int stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    int in_zero, out_zero, low, high;
    FixedPoint *scale; /* one an output channel */
    const int32_t *bias;
} Geometry;

static Geometry geometry(const Operation *o, int padding, int activation, int stride_h, int stride_w, int dilation_h,
                         int dilation_w) {
    const Tensor *x = o->in[0], *w = o->in[1], *y = o->out;
    Geometry g = {
        .in_h = x->dims->data[1], .in_w = x->dims->data[2], .in_c = x->dims->data[3],
        .out_h = y->dims->data[1], .out_w = y->dims->data[2], .out_c = y->dims->data[3],
        .kernel_h = w->dims->data[1], .kernel_w = w->dims->data[2],
        .stride_h = stride_h, .stride_w = stride_w, .dilation_h = dilation_h, .dilation_w = dilation_w,
        .in_zero = x->params.zero_point, .out_zero = y->params.zero_point,
        .bias = o->in_count > 2 ? o->in_data[2] : NULL,
    };
    g.pad_h = padding_before(padding, g.in_h, g.out_h, g.kernel_h, stride_h, dilation_h);
    g.pad_w = padding_before(padding, g.in_w, g.out_w, g.kernel_w, stride_w, dilation_w);
    activation_range(activation, y, &g.low, &g.high);
    const FloatArray *scales = ((const AffineQuantization *)w->quantization.params)->scale;
    g.scale = malloc(sizeof *g.scale * (size_t)g.out_c);
    for (int c = 0; c < g.out_c; c++) {
        double weight_scale = scales->data[scales->size > 1 ? c : 0];
        g.scale[c] = fixed_point((double)x->params.scale * weight_scale / (double)y->params.scale);
    }
    return g;
}

HOT static void finish(const Geometry *g, const int32_t *sums, int8_t *y) {
    for (int c = 0; c < g->out_c; c++) {
        int32_t sum = g->bias ? sums[c] + g->bias[c] : sums[c];
        y[c] = clamp(scale_by(sum, g->scale[c]) + g->out_zero, g->low, g->high);
    }
}

/* Weights as [kernel][input channel][output channel]: the inner loop then runs over outputs, which are many, and needs
 * no sum across a vector. `zero` receives each output's share of the input's zero point, a kernel element at a time. */
static int16_t *pack_weights(const Geometry *g, const int8_t *w, int32_t *zero) {
    int taps = g->kernel_h * g->kernel_w;
    int16_t *packed = malloc(sizeof *packed * (size_t)taps * g->in_c * g->out_c);
    for (int c = 0; c < g->out_c; c++)
        for (int tap = 0; tap < taps; tap++) {
            int32_t sum = 0;
            for (int i = 0; i < g->in_c; i++, w++) {
                packed[((size_t)tap * g->in_c + i) * g->out_c + c] = *w;
                sum += *w;
            }
            zero[(size_t)tap * g->out_c + c] = sum * g->in_zero;
        }
    return packed;
}

HOT static void add_tap(int32_t *sums, const int8_t *x, const int16_t *w, const int32_t *zero, int in_c, int out_c) {
    for (int c = 0; c < out_c; c++) sums[c] -= zero[c];
    int i = 0;
    for (; i + 4 <= in_c; i += 4, w += 4 * (size_t)out_c) {
        const int16_t *w1 = w + out_c, *w2 = w1 + out_c, *w3 = w2 + out_c;
        int32_t x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
        for (int c = 0; c < out_c; c++) sums[c] += x0 * w[c] + x1 * w1[c] + x2 * w2[c] + x3 * w3[c];
    }
    for (; i < in_c; i++, w += out_c)
        for (int c = 0; c < out_c; c++) sums[c] += x[i] * w[c];
}

static void conv_pixel(const Geometry *g, const int8_t *x, const int16_t *w, const int32_t *zero, int oy, int ox,
                       int32_t *sums) {
    memset(sums, 0, sizeof *sums * (size_t)g->out_c);
    for (int ky = 0; ky < g->kernel_h; ky++) {
        int iy = oy * g->stride_h - g->pad_h + ky * g->dilation_h;
        if (iy < 0 || iy >= g->in_h) continue;
        for (int kx = 0; kx < g->kernel_w; kx++) {
            int ix = ox * g->stride_w - g->pad_w + kx * g->dilation_w;
            if (ix < 0 || ix >= g->in_w) continue;
            size_t tap = (size_t)ky * g->kernel_w + kx;
            add_tap(sums, x + ((size_t)iy * g->in_w + ix) * g->in_c, w + tap * g->in_c * g->out_c, zero + tap * g->out_c,
                    g->in_c, g->out_c);
        }
    }
}

static void conv(const Operation *o) {
    const ConvParams *p = o->params;
    Geometry g = geometry(o, p->padding, p->activation, p->stride_h, p->stride_w, p->dilation_h, p->dilation_w);
    int32_t *zero = malloc(sizeof *zero * (size_t)g.kernel_h * g.kernel_w * g.out_c);
    int32_t *sums = malloc(sizeof *sums * (size_t)g.out_c);
    int16_t *w = pack_weights(&g, o->in_data[1], zero);
    int8_t *y = o->out_data;
    for (int oy = 0; oy < g.out_h; oy++)
        for (int ox = 0; ox < g.out_w; ox++, y += g.out_c) {
            conv_pixel(&g, o->in_data[0], w, zero, oy, ox, sums);
            finish(&g, sums, y);
        }
    free(w);
    free(sums);
    free(zero);
    free(g.scale);
}

HOT static void add_products(int32_t *sums, const int8_t *x, const int8_t *w, int zero, int channels) {
    for (int c = 0; c < channels; c++) sums[c] += w[c] * (x[c] - zero);
}

static void depthwise_pixel(const Geometry *g, const int8_t *x, const int8_t *w, int oy, int ox, int32_t *sums) {
    int multiplier = g->out_c / g->in_c;
    memset(sums, 0, sizeof *sums * (size_t)g->out_c);
    for (int ky = 0; ky < g->kernel_h; ky++) {
        int iy = oy * g->stride_h - g->pad_h + ky * g->dilation_h;
        if (iy < 0 || iy >= g->in_h) continue;
        for (int kx = 0; kx < g->kernel_w; kx++) {
            int ix = ox * g->stride_w - g->pad_w + kx * g->dilation_w;
            if (ix < 0 || ix >= g->in_w) continue;
            const int8_t *px = x + ((size_t)iy * g->in_w + ix) * g->in_c;
            const int8_t *pw = w + ((size_t)ky * g->kernel_w + kx) * g->out_c;
            if (multiplier == 1) {
                add_products(sums, px, pw, g->in_zero, g->out_c);
                continue;
            }
            for (int c = 0; c < g->out_c; c++) sums[c] += pw[c] * (px[c / multiplier] - g->in_zero);
        }
    }
}

static void depthwise(const Operation *o) {
    const DepthwiseParams *p = o->params;
    Geometry g = geometry(o, p->padding, p->activation, p->stride_h, p->stride_w, p->dilation_h, p->dilation_w);
    int32_t *sums = malloc(sizeof *sums * (size_t)g.out_c);
    int8_t *y = o->out_data;
    for (int oy = 0; oy < g.out_h; oy++)
        for (int ox = 0; ox < g.out_w; ox++, y += g.out_c) {
            depthwise_pixel(&g, o->in_data[0], o->in_data[1], oy, ox, sums);
            finish(&g, sums, y);
        }
    free(sums);
    free(g.scale);
}

/* ---- everything else ---- */

HOT static void add(const Operation *o) {
    const AddParams *p = o->params;
    const Tensor *a = o->in[0], *b = o->in[1], *y = o->out;
    const int8_t *pa = o->in_data[0], *pb = o->in_data[1];
    double twice = 2.0 * fmax((double)a->params.scale, (double)b->params.scale);
    FixedPoint fa = fixed_point((double)a->params.scale / twice), fb = fixed_point((double)b->params.scale / twice);
    FixedPoint fy = fixed_point(twice / ((1 << 20) * (double)y->params.scale));
    int low, high;
    activation_range(p->activation, y, &low, &high);
    for (size_t i = 0; i < y->bytes; i++) {
        int32_t sum = scale_by((pa[i] - a->params.zero_point) * (1 << 20), fa) +
                      scale_by((pb[i] - b->params.zero_point) * (1 << 20), fb);
        ((int8_t *)o->out_data)[i] = clamp(scale_by(sum, fy) + y->params.zero_point, low, high);
    }
}

static void quantize(const Operation *o) {
    const Tensor *x = o->in[0], *y = o->out;
    FixedPoint f = fixed_point((double)x->params.scale / (double)y->params.scale);
    for (size_t i = 0; i < y->bytes; i++) {
        int32_t code = x->type == TYPE_UINT8 ? ((const uint8_t *)o->in_data[0])[i] : ((const int8_t *)o->in_data[0])[i];
        ((int8_t *)o->out_data)[i] = clamp(scale_by(code - x->params.zero_point, f) + y->params.zero_point, -128, 127);
    }
}

static void logistic(const Operation *o) {
    const Tensor *x = o->in[0], *y = o->out;
    int8_t table[256];
    float inverse = 1 / y->params.scale;
    for (int code = -128; code < 128; code++) {
        float value = x->params.scale * (float)(code - x->params.zero_point);
        float rescaled = roundf(1.0f / (1.0f + expf(-value)) * inverse);
        table[(uint8_t)code] = clamp((int32_t)(rescaled + (float)y->params.zero_point), -128, 127);
    }
    for (size_t i = 0; i < y->bytes; i++) ((int8_t *)o->out_data)[i] = table[((const uint8_t *)o->in_data[0])[i]];
}

/* Where an output row (or column) falls between two input ones, in units of 1/1024. */
typedef struct { int lower, upper; int32_t weight; } Between;

static Between between(int at, int in, int out, bool half_pixel_centers) {
    int32_t scale = (1024 * in + out / 2) / out;
    int32_t position = at * scale + (half_pixel_centers ? scale / 2 - 512 : 0);
    int lower = position / 1024, upper = (position + 1023) / 1024;
    if (lower < 0) lower = 0;
    if (upper > in - 1) upper = in - 1;
    return (Between){lower, upper, position - 1024 * lower};
}

HOT static void resize(const Operation *o) {
    const ResizeParams *p = o->params;
    const Tensor *x = o->in[0], *y = o->out;
    int in_h = x->dims->data[1], in_w = x->dims->data[2], channels = x->dims->data[3];
    int out_h = y->dims->data[1], out_w = y->dims->data[2];
    const int8_t *in = o->in_data[0];
    int8_t *out = o->out_data;
    for (int oy = 0; oy < out_h; oy++) {
        Between r = between(oy, in_h, out_h, p->half_pixel_centers);
        const int8_t *above = in + (size_t)r.lower * in_w * channels, *below = in + (size_t)r.upper * in_w * channels;
        for (int ox = 0; ox < out_w; ox++) {
            Between q = between(ox, in_w, out_w, p->half_pixel_centers);
            for (int c = 0; c < channels; c++) {
                int left = q.lower * channels + c, right = q.upper * channels + c;
                int64_t sum = (int64_t)above[left] * (1024 - r.weight) * (1024 - q.weight) +
                              (int64_t)below[left] * r.weight * (1024 - q.weight) +
                              (int64_t)above[right] * (1024 - r.weight) * q.weight +
                              (int64_t)below[right] * r.weight * q.weight;
                *out++ = (int8_t)((sum + (sum > 0 ? 1 << 19 : -(1 << 19))) / (1 << 20));
            }
        }
    }
}

void compute(const Operation *operation) {
    switch (operation->op) {
    case OP_CONV_2D: conv(operation); break;
    case OP_DEPTHWISE_CONV_2D: depthwise(operation); break;
    case OP_ADD: add(operation); break;
    case OP_QUANTIZE: quantize(operation); break;
    case OP_LOGISTIC: logistic(operation); break;
    case OP_RESIZE_BILINEAR: resize(operation); break;
    case OP_RESHAPE: memmove(operation->out_data, operation->in_data[0], operation->out->bytes); break;
    }
}

/* ---- what can be computed here ---- */

static bool same_shape(const Tensor *a, const Tensor *b) {
    size_t bytes = sizeof(int) * (size_t)a->dims->size;
    return a->dims->size == b->dims->size && !memcmp(a->dims->data, b->dims->data, bytes);
}

const char *unsupported(const Context *context, const Node *node, int op) {
    const Tensor *x = &context->tensors[node->inputs->data[0]], *y = &context->tensors[node->outputs->data[0]];
    if (y->type != TYPE_INT8) return "its output is not int8";
    if (x->type != TYPE_INT8 && !(op == OP_QUANTIZE && x->type == TYPE_UINT8)) return "its input is not int8";
    if (op == OP_RESHAPE) return NULL;
    const Tensor *second = node->inputs->size > 1 ? &context->tensors[node->inputs->data[1]] : NULL;
    switch (op) {
    case OP_CONV_2D:
    case OP_DEPTHWISE_CONV_2D:
        if (x->dims->size != 4 || x->dims->data[0] != 1) return "its batch is not 1";
        if (second->type != TYPE_INT8) return "its weights are not int8";
        if (second->quantization.type != QUANTIZATION_AFFINE) return "its weights have no scale";
        if (op == OP_CONV_2D && second->dims->data[3] != x->dims->data[3]) return "it is grouped";
        return NULL;
    case OP_ADD:
        if (second->type != TYPE_INT8) return "its second input is not int8";
        return same_shape(x, second) ? NULL : "it broadcasts";
    case OP_RESIZE_BILINEAR:
        if (x->dims->size != 4 || x->dims->data[0] != 1) return "its batch is not 1";
        return ((const ResizeParams *)node->builtin_data)->align_corners ? "it aligns corners" : NULL;
    default: return NULL;
    }
}

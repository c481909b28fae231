/* The part of TensorFlow Lite's C delegate interface that an external delegate touches (LP64).
 *
 * No runtime wheel ships these headers, so the layouts are written out here. They are the ones of
 * tensorflow/lite/core/c/common.h, the same in tflite-runtime 2.14 and in LiteRT 2.3. Fields after the last one used
 * are left out where the runtime, not we, allocates the struct. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { STATUS_OK = 0, STATUS_ERROR = 1, STATUS_DELEGATE_ERROR = 2 } Status;

enum { TYPE_FLOAT32 = 1, TYPE_INT32 = 2, TYPE_UINT8 = 3, TYPE_INT8 = 9 };
enum { ALLOCATION_MMAP_RO = 1 };
enum { QUANTIZATION_AFFINE = 1 };
enum { PADDING_SAME = 1, PADDING_VALID = 2 };
enum { ACTIVATION_NONE = 0, ACTIVATION_RELU = 1, ACTIVATION_RELU_N1_TO_1 = 2, ACTIVATION_RELU6 = 3 };
enum {
    OP_ADD = 0,
    OP_CONV_2D = 3,
    OP_DEPTHWISE_CONV_2D = 4,
    OP_LOGISTIC = 14,
    OP_RESHAPE = 22,
    OP_RESIZE_BILINEAR = 23,
    OP_DELEGATE = 51,
    OP_QUANTIZE = 114,
    OP_LIMIT = 256,
};

typedef struct { int size; int data[]; } IntArray;
typedef struct { int size; float data[]; } FloatArray;
typedef struct { FloatArray *scale; IntArray *zero_point; int32_t quantized_dimension; } AffineQuantization;

struct Context;
struct Delegate;
struct Registration;

typedef struct Tensor {
    int type;
    union { void *raw; int8_t *i8; uint8_t *u8; int32_t *i32; float *f32; } data;
    IntArray *dims;
    struct { float scale; int32_t zero_point; } params;
    int allocation_type;
    size_t bytes;
    const void *allocation;
    const char *name;
    struct Delegate *delegate;
    int buffer_handle;
    bool data_is_stale;
    bool is_variable;
    struct { int type; void *params; } quantization;
    void *sparsity;
    const IntArray *dims_signature;
} Tensor;

typedef struct Node {
    IntArray *inputs, *outputs, *intermediates, *temporaries;
    void *user_data;
    void *builtin_data;
    const void *custom_initial_data;
    int custom_initial_data_size;
    struct Delegate *delegate;
    bool might_have_side_effect;
} Node;

typedef struct Context {
    size_t tensors_size;
    Status (*GetExecutionPlan)(struct Context *, IntArray **);
    Tensor *tensors;
    void *impl_;
    Status (*ResizeTensor)(struct Context *, Tensor *, IntArray *);
    void (*ReportError)(struct Context *, const char *, ...);
    Status (*AddTensors)(struct Context *, int, int *);
    Status (*GetNodeAndRegistration)(struct Context *, int, Node **, struct Registration **);
    Status (*ReplaceNodeSubsetsWithDelegateKernels)(struct Context *, struct Registration, const IntArray *,
                                                    struct Delegate *);
} Context;

typedef struct Registration {
    void *(*init)(Context *, const char *, size_t);
    void (*free)(Context *, void *);
    Status (*prepare)(Context *, Node *);
    Status (*invoke)(Context *, Node *);
    const char *(*profiling_string)(const Context *, const Node *);
    int32_t builtin_code;
    const char *custom_name;
    int version;
    void *registration_external;
    void *async_kernel;
    uint64_t inplace_operator;
} Registration;

typedef struct Delegate {
    void *data_;
    Status (*Prepare)(Context *, struct Delegate *);
    void *CopyFromBufferHandle, *CopyToBufferHandle, *FreeBufferHandle;
    int64_t flags;
    void *opaque_delegate_builder;
} Delegate;

typedef struct {
    Delegate *delegate;
    IntArray *nodes_to_replace, *input_tensors, *output_tensors;
} DelegateParams;

typedef struct { int padding, stride_w, stride_h, activation, dilation_w, dilation_h; } ConvParams;
typedef struct { int padding, stride_w, stride_h, depth_multiplier, activation, dilation_w, dilation_h; } DepthwiseParams;
typedef struct { int activation; } AddParams;
typedef struct { bool align_corners, half_pixel_centers; } ResizeParams;

/* A field that moved would be read as garbage: stop the build instead. */
_Static_assert(offsetof(Tensor, bytes) == 40 && offsetof(Tensor, quantization) == 80, "Tensor");
_Static_assert(offsetof(Node, user_data) == 32 && offsetof(Node, builtin_data) == 40, "Node");
_Static_assert(offsetof(Context, tensors) == 16 && offsetof(Context, ReplaceNodeSubsetsWithDelegateKernels) == 64, "Context");
_Static_assert(offsetof(Registration, builtin_code) == 40 && sizeof(Registration) == 88, "Registration");
_Static_assert(offsetof(Delegate, flags) == 40 && sizeof(Delegate) == 56, "Delegate");

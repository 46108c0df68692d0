/* The C interface of blocksparse. Every function that can fail returns a bs_status; bs_last_error() then says why, on
 * the thread that called. No function prints, aborts, throws or frees what it did not make. ops.h says what the ops
 * compute and what they require of their arguments; layout.h and graphs.h describe layouts and graphs. */
#ifndef BLOCKSPARSE_C_API_H_
#define BLOCKSPARSE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define BS_API
#else
#define BS_API __attribute__((visibility("default")))
#endif

/* Raised when a function or struct of this header changes so that programs must be compiled again. */
#define BS_ABI_VERSION 11

typedef int32_t bs_status;
enum { BS_OK = 0, BS_INVALID_ARGUMENT = 1, BS_UNSUPPORTED = 2, BS_UNAVAILABLE = 3, BS_OUT_OF_MEMORY = 4 };
enum { BS_F32 = 0, BS_F64 = 1, BS_BF16 = 2, BS_F16 = 3 };
enum { BS_CPU = 0, BS_CUDA = 1 };
enum { BS_MATH_IEEE = 0, BS_MATH_TF32 = 1 };
enum {
  BS_ACTIVATION_NONE = 0,
  BS_ACTIVATION_RELU = 1,
  BS_ACTIVATION_GELU = 2,
  BS_ACTIVATION_SILU = 3,
  BS_ACTIVATION_GELU_TANH = 4
};

BS_API int32_t bs_abi_version(void);
BS_API const char* bs_version(void);    /* "major.minor.patch" */
BS_API const char* bs_last_error(void); /* of this thread; "" if its last call went well */

/* ---- Machine ---------------------------------------------------------------------------------------------------- */

BS_API const char* bs_cpu_isas(void);           /* those that this CPU runs, best first: "avx2 scalar reference" */
BS_API bs_status bs_cpu_isa(const char** name); /* the one in use */
/* "" for the best. BLOCKSPARSE_ISA in the environment names one as well. */
BS_API bs_status bs_set_cpu_isa(const char* name);

BS_API bs_status bs_cuda_status(void);    /* BS_OK if CUDA tensors can be used */
BS_API const char* bs_cuda_kernels(void); /* of this build, best first; "" in builds without CUDA */
/* "" lets ops choose again. BLOCKSPARSE_CUDA_KERNEL in the environment names a kernel as well. Workspace sizes change
 * with the kernel: ask for them anew. No other thread may be in an op. */
BS_API bs_status bs_set_cuda_kernel(const char* name);
BS_API bs_status bs_cuda_prepare(int32_t device_index); /* loads all kernels, as the first op on a device does */
/* Ops that this thread calls from now on leave `count` multiprocessors of their card to other streams. 0: none.
 * Workspace sizes change: ask for them anew. */
BS_API bs_status bs_cuda_leave_multiprocessors(int32_t count);

BS_API int32_t bs_default_threads(void); /* what threads = 0 stands for */

/* ---- Layouts ---------------------------------------------------------------------------------------------------- */

typedef struct bs_layout bs_layout; /* immutable; may be used by several threads at once */

typedef struct bs_blocking {
  int32_t block_size;   /* 8, 16, 32, 64 or 128 */
  int64_t out_features; /* 0: blocks * block_size */
  int64_t in_features;
} bs_blocking;

typedef struct bs_layout_info {
  int32_t block_size;
  int32_t transposed;
  int64_t out_features, in_features;
  int64_t out_blocks, in_blocks;
  int64_t blocks;
  int64_t pattern_words; /* int32 words that bs_layout_pattern writes */
  int64_t index_words;   /* int32 words at bs_layout_view.index */
  uint64_t hash;
} bs_layout_info;

/* What an op needs to know of a layout. Valid as long as the layout that it came from. For tables that were copied
 * elsewhere, set `index` and the device: the view is then valid as long as the copy. */
typedef struct bs_layout_view {
  const int32_t* index;
  int32_t device_type, device_index;
  int32_t transposed;
  int32_t block_size;
  int64_t out_features, in_features; /* of the untransposed layout */
  int64_t blocks;
  int32_t cut_by_out, cut_by_in; /* whether rows, columns of W are cut into slices: calls then need more workspace */
} bs_layout_view;

/* On success *layout is new and is given back with bs_layout_free. */
BS_API bs_status bs_layout_from_mask(const uint8_t* mask, int64_t out_blocks, int64_t in_blocks,
                                     const bs_blocking* blocking, bs_layout** layout);
BS_API bs_status bs_layout_from_coordinates(const int32_t* out, const int32_t* in, int64_t blocks, int64_t out_blocks,
                                            int64_t in_blocks, const bs_blocking* blocking, bs_layout** layout);
BS_API bs_status bs_layout_from_csr(const int64_t* row_start, const int64_t* columns, int64_t out_blocks,
                                    int64_t in_blocks, const bs_blocking* blocking, bs_layout** layout);
BS_API bs_status bs_layout_from_graph(const char* name, int64_t seed, const bs_blocking* blocking, bs_layout** layout);
BS_API bs_status bs_layout_from_pattern(const int32_t* pattern, int64_t words, bs_layout** layout);
BS_API bs_status bs_layout_t(const bs_layout* layout, bs_layout** transposed);
/* `times` copies of W, one below the other: the gates of an LSTM, say. */
BS_API bs_status bs_layout_stack(const bs_layout* layout, int64_t times, bs_layout** stacked);
BS_API void bs_layout_free(bs_layout* layout); /* NULL is allowed */

BS_API bs_status bs_layout_get_info(const bs_layout* layout, bs_layout_info* info);
BS_API bs_status bs_layout_get_view(const bs_layout* layout, bs_layout_view* view);
/* The tables as a card likes them best: those of the view, which work as well, and the order in which kernels for many
 * tokens take strips of rows. index has index_words words. */
BS_API bs_status bs_layout_index_for_card(const bs_layout* layout, int32_t* index);
BS_API bs_status bs_layout_view_from_index(const int32_t* index, int64_t words, bs_layout_view* view);
/* A view of tables of `words` words that were copied to a device. The caller fills in the view except cut_by_out and
 * cut_by_in, which the function writes. The sizes are checked against `words`. */
BS_API bs_status bs_layout_view_on_device(int64_t words, bs_layout_view* view);
typedef struct bs_workspace {
  void* data; /* on a card at a multiple of 64 */
  size_t bytes;
} bs_workspace;

typedef struct bs_stream {
  void* handle;    /* cudaStream_t; unused on the CPU */
  int32_t threads; /* CPU; 0: the default */
  int32_t math;    /* of f32 on CUDA: BS_MATH_TF32 allows tf32 */
} bs_stream;

/* Tables that a card makes from a mask [out_blocks, in_blocks] of bytes in its memory: see make_device_index() in
 * device_index.h. The caller fills in the view, except `index` (an argument of bs_layout_build), cut_by_out and
 * cut_by_in. */
BS_API bs_status bs_layout_build_words(const bs_layout_view* view, int64_t* words);
BS_API size_t bs_layout_build_workspace_size(const bs_layout_view* view); /* 0 if the sizes are wrong */
BS_API bs_status bs_layout_build(const uint8_t* mask, const bs_layout_view* view, int32_t* index, int64_t words,
                                 bs_workspace workspace, bs_stream stream);
/* The layout of tables that a card made and that were copied to the host. */
BS_API bs_status bs_layout_from_device_index(const int32_t* index, int64_t words, bs_layout** layout);
/* CSR of the untransposed W. */
BS_API bs_status bs_layout_csr(const bs_layout* layout, int32_t* row_start, int32_t* columns);
BS_API bs_status bs_layout_pattern(const bs_layout* layout, int32_t* pattern);
BS_API bs_status bs_layout_equal(const bs_layout* a, const bs_layout* b, int32_t* equal);

typedef struct bs_degrees {
  int64_t min;
  double median;
  int64_t max;
} bs_degrees;

#define BS_MAX_MIX 64

typedef struct bs_report {
  int64_t blocks;
  double density;
  bs_degrees out, in;
  double mean_path, unreachable, clustering;
  int64_t diameter;
  int32_t symmetric, sampled;
  int32_t mix_steps; /* entries of mix in use */
  double mix[BS_MAX_MIX];
} bs_report;

BS_API bs_status bs_layout_report(const bs_layout* layout, bs_report* report);
/* mix [count]: share of blocks reached after each step when step i goes through layouts[i]. */
BS_API bs_status bs_layout_mix(const bs_layout* const* layouts, int64_t count, double* mix);

/* ---- The linear op ---------------------------------------------------------------------------------------------- */

#define BS_MAX_RANK 5

typedef struct bs_tensor {
  void* data;
  int32_t dtype;
  int32_t device_type, device_index;
  int32_t rank;
  int64_t shape[BS_MAX_RANK];
  int64_t stride[BS_MAX_RANK]; /* in elements */
} bs_tensor;

typedef struct bs_epilogue {
  const bs_tensor* bias;     /* NULL: none */
  const bs_tensor* residual; /* NULL: none */
  int32_t activation;
} bs_epilogue;

/* `gates` and `epilogue` may be NULL. `workspace` holds at least what the functions below say. */
BS_API bs_status bs_linear_fprop(const bs_layout_view* layout, const bs_tensor* x, const bs_tensor* w,
                                 const bs_tensor* gates, const bs_epilogue* epilogue, const bs_tensor* y,
                                 bs_workspace workspace, bs_stream stream);
BS_API bs_status bs_linear_dgrad(const bs_layout_view* layout, const bs_tensor* dy, const bs_tensor* w,
                                 const bs_tensor* gates, const bs_tensor* dx, bs_workspace workspace, bs_stream stream);
/* x and dy are arrays of `pairs` tensors. `w`, `gates` and `dgates` may be NULL. */
BS_API bs_status bs_linear_wgrad(const bs_layout_view* layout, int64_t pairs, const bs_tensor* x, const bs_tensor* dy,
                                 const bs_tensor* w, const bs_tensor* gates, int32_t accumulate, const bs_tensor* dw,
                                 const bs_tensor* dgates, bs_workspace workspace, bs_stream stream);

/* Bytes for n tokens (wgrad: of all pairs together). On a card, fewer tokens may need more. 0 if the layout is NULL. */
BS_API size_t bs_linear_fprop_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n);
BS_API size_t bs_linear_dgrad_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n);
BS_API size_t bs_linear_wgrad_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n);

/* The gradient of a bias, of a linear layer or a convolution: sums of dy over its tokens. */
BS_API bs_status bs_bias_gradient(const bs_tensor* dy, const bs_tensor* dbias, bs_workspace workspace,
                                  bs_stream stream);
BS_API size_t bs_bias_gradient_workspace_size(const bs_tensor* dy); /* 0 if it is NULL */

/* ---- Gated linear units ------------------------------------------------------------------------------------------ */
/* See glu.h: eight features of the gate and eight of up alternate. `gates` and `epilogue` may be NULL. */

BS_API bs_status bs_linear_glu_fprop(const bs_layout_view* layout, const bs_tensor* x, const bs_tensor* w,
                                     const bs_tensor* gates, const bs_epilogue* epilogue, const bs_tensor* y,
                                     bs_workspace workspace, bs_stream stream);
BS_API size_t bs_linear_glu_fprop_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n);
BS_API bs_status bs_glu_forward(const bs_tensor* z, int32_t activation, const bs_tensor* y, bs_stream stream);
BS_API bs_status bs_glu_backward(const bs_tensor* z, const bs_tensor* dy, int32_t activation, const bs_tensor* dz,
                                 bs_stream stream);

/* ---- The convolution --------------------------------------------------------------------------------------------- */
/* See conv.h. `gates`, `epilogue`, `dgates` and the w of bs_conv_wgrad may be NULL. `channel_order` [channels of x]
 * lies in the memory of the tensors' device and may be NULL. The CPU checks it. On a card an entry that is no channel
 * reads zeros and writes nothing. */

#define BS_MAX_SIZES 3

typedef struct bs_conv_geometry {
  int32_t rank;       /* 1 to 3; the entries beyond are not looked at */
  int32_t transposed; /* 0 or 1 */
  int64_t kernel[BS_MAX_SIZES], stride[BS_MAX_SIZES], dilation[BS_MAX_SIZES];
  int64_t padding_before[BS_MAX_SIZES], padding_after[BS_MAX_SIZES];
  int64_t output_padding[BS_MAX_SIZES]; /* 0 unless transposed */
} bs_conv_geometry;

/* size and output have `rank` entries. */
BS_API bs_status bs_conv_output_size(const bs_conv_geometry* geometry, const int64_t* size, int64_t* output);

BS_API bs_status bs_conv_fprop(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                               const bs_tensor* w, const bs_tensor* gates, const int32_t* channel_order,
                               const bs_epilogue* epilogue, const bs_tensor* y, bs_workspace workspace,
                               bs_stream stream);
BS_API bs_status bs_conv_dgrad(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* dy,
                               const bs_tensor* w, const bs_tensor* gates, const int32_t* channel_order,
                               const bs_tensor* dx, bs_workspace workspace, bs_stream stream);
BS_API bs_status bs_conv_wgrad(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                               const bs_tensor* dy, const bs_tensor* w, const bs_tensor* gates,
                               const int32_t* channel_order, int32_t accumulate, const bs_tensor* dw,
                               const bs_tensor* dgates, bs_workspace workspace, bs_stream stream);

/* Bytes for a call with the dtype, shape, strides and device of x (dgrad: dx), with or without an order. Neither x nor
 * the order is read. 0 if x does not fit. */
BS_API size_t bs_conv_fprop_workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry,
                                           const bs_tensor* x, const int32_t* channel_order);
BS_API size_t bs_conv_dgrad_workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry,
                                           const bs_tensor* x, const int32_t* channel_order);
BS_API size_t bs_conv_wgrad_workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry,
                                           const bs_tensor* x, const int32_t* channel_order);

/* ---- The LSTM op ------------------------------------------------------------------------------------------------- */
/* See lstm.h. Tensors that are not given are NULL. `lengths` [n] lie in the memory of the tensors' device. NULL: all
 * sequences have all steps. */

typedef struct bs_lstm_outputs {
  const bs_tensor* y;
  const bs_tensor *h, *c;         /* or NULL */
  const bs_tensor *gates, *cells; /* both or neither: what the backward pass needs */
} bs_lstm_outputs;

typedef struct bs_lstm_saved {
  const bs_tensor *w, *h0, *c0;
  const int64_t* lengths;
  const bs_tensor *y, *gates, *cells;
} bs_lstm_saved;

typedef struct bs_lstm_grads {
  const bs_tensor* pre;
  const bs_tensor *w, *h0, *c0; /* or NULL */
} bs_lstm_grads;

BS_API bs_status bs_lstm_forward(const bs_layout_view* layout, const bs_tensor* pre, const bs_tensor* w,
                                 const bs_tensor* h0, const bs_tensor* c0, const int64_t* lengths,
                                 const bs_lstm_outputs* outputs, bs_workspace workspace, bs_stream stream);
/* dy, dh and dc may be NULL. */
BS_API bs_status bs_lstm_backward(const bs_layout_view* layout, const bs_lstm_saved* saved, const bs_tensor* dy,
                                  const bs_tensor* dh, const bs_tensor* dc, int32_t accumulate,
                                  const bs_lstm_grads* grads, bs_workspace workspace, bs_stream stream);
BS_API size_t bs_lstm_forward_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t steps, int64_t n);
BS_API size_t bs_lstm_backward_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t steps, int64_t n);

/* ---- The layer norm ---------------------------------------------------------------------------------------------- */
/* See norm.h. Tensors that are not given are NULL. */

typedef struct bs_layer_norm_inputs {
  const bs_tensor *x, *gain, *shift;
  const bs_tensor *factor, *term; /* or NULL */
  int32_t relu;
  double epsilon;
} bs_layer_norm_inputs;

typedef struct bs_layer_norm_saved {
  const bs_tensor *x, *gain, *shift;
  const bs_tensor *factor, *y; /* or NULL */
  const bs_tensor* stats;
  int32_t relu;
} bs_layer_norm_saved;

typedef struct bs_layer_norm_grads {
  const bs_tensor* x;
  const bs_tensor *gain, *shift, *factor, *term; /* or NULL */
} bs_layer_norm_grads;

BS_API bs_status bs_layer_norm_forward(const bs_layer_norm_inputs* inputs, const bs_tensor* y, const bs_tensor* stats,
                                       bs_stream stream);
BS_API bs_status bs_layer_norm_backward(const bs_layer_norm_saved* saved, const bs_tensor* dy,
                                        const bs_layer_norm_grads* grads, bs_stream stream);

/* ---- The deep-update LSTM ---------------------------------------------------------------------------------------- */
/* See deep_update.h. Tensors that are not given are NULL. */

typedef struct bs_deep_update_matrix {
  const bs_layout_view* layout;
  const bs_tensor *w, *gain, *shift;
} bs_deep_update_matrix;

typedef struct bs_deep_update_inputs {
  const bs_deep_update_matrix* matrices;
  int32_t count; /* of matrices */
  const bs_tensor *factor, *term, *h0, *c0;
  const int64_t* lengths; /* or NULL */
  double epsilon;
} bs_deep_update_inputs;

typedef struct bs_deep_update_matrix_grads {
  const bs_tensor* w; /* or NULL */
  const bs_tensor *gain, *shift;
} bs_deep_update_matrix_grads;

typedef struct bs_deep_update_grads {
  const bs_deep_update_matrix_grads* matrices; /* as many as there are */
  const bs_tensor *factor, *term;
  const bs_tensor *h0, *c0; /* or NULL */
} bs_deep_update_grads;

/* `saved` {NULL, 0}: there will be no backward pass. */
BS_API bs_status bs_deep_update_forward(const bs_deep_update_inputs* inputs, const bs_tensor* y, const bs_tensor* h,
                                        const bs_tensor* c, bs_workspace saved, bs_workspace workspace,
                                        bs_stream stream);
/* dy, dh and dc may be NULL. */
BS_API bs_status bs_deep_update_backward(const bs_deep_update_inputs* inputs, const bs_tensor* y, bs_workspace saved,
                                         const bs_tensor* dy, const bs_tensor* dh, const bs_tensor* dc,
                                         const bs_deep_update_grads* grads, bs_workspace workspace, bs_stream stream);
/* In bytes. Only the layouts and the shape, dtype and device of `factor` are looked at. 0 if they are wrong. */
BS_API size_t bs_deep_update_saved_size(const bs_deep_update_inputs* inputs);
BS_API size_t bs_deep_update_forward_workspace_size(const bs_deep_update_inputs* inputs);
BS_API size_t bs_deep_update_backward_workspace_size(const bs_deep_update_inputs* inputs);

/* ---- The multiplicative LSTM --------------------------------------------------------------------------------------
 */
/* See multiplicative.h. Tensors that are not given are NULL. */

typedef struct bs_multiplicative_inputs {
  const bs_layout_view *layout_m, *layout;
  const bs_tensor *w_m, *w, *factor, *pre, *h0, *c0;
  const int64_t* lengths; /* or NULL */
} bs_multiplicative_inputs;

typedef struct bs_multiplicative_grads {
  const bs_tensor *w_m, *w; /* or NULL */
  const bs_tensor *factor, *pre;
  const bs_tensor *h0, *c0; /* or NULL */
} bs_multiplicative_grads;

/* `saved` {NULL, 0}: there will be no backward pass. */
BS_API bs_status bs_multiplicative_forward(const bs_multiplicative_inputs* inputs, const bs_tensor* y,
                                           const bs_tensor* h, const bs_tensor* c, bs_workspace saved,
                                           bs_workspace workspace, bs_stream stream);
/* dy, dh and dc may be NULL. */
BS_API bs_status bs_multiplicative_backward(const bs_multiplicative_inputs* inputs, const bs_tensor* y,
                                            bs_workspace saved, const bs_tensor* dy, const bs_tensor* dh,
                                            const bs_tensor* dc, const bs_multiplicative_grads* grads,
                                            bs_workspace workspace, bs_stream stream);
/* In bytes. Only the layouts and the shape, dtype and device of `factor` are looked at. 0 if they are wrong. */
BS_API size_t bs_multiplicative_saved_size(const bs_multiplicative_inputs* inputs);
BS_API size_t bs_multiplicative_forward_workspace_size(const bs_multiplicative_inputs* inputs);
BS_API size_t bs_multiplicative_backward_workspace_size(const bs_multiplicative_inputs* inputs);

/* ---- Adapters --------------------------------------------------------------------------------------------------- */

/* Registers C++ kernels for the PyTorch ops that the Python package defines. `family` is "linear", "conv", "lstm" or
 * "glu", the device BS_CPU or BS_CUDA; call it once for each pair. Returns "" or the reason why registration failed. */
BS_API const char* bs_torch_register(const char* family, int32_t device_type);

/* Handlers of XLA's custom calls ("FFI"), for its platforms "Host" and "CUDA". `call_frame` is an XLA_FFI_CallFrame*.
 * The result is an XLA_FFI_Error*, or NULL for success. Nothing of XLA is compiled in or linked; a handler reports to
 * each runtime a version that the runtime accepts. python/blocksparse/jax/ops lists the arguments of each handler. */
BS_API void* bs_xla_linear_fprop(void* call_frame);
BS_API void* bs_xla_linear_dgrad(void* call_frame);
BS_API void* bs_xla_linear_wgrad(void* call_frame);
BS_API void* bs_xla_linear_glu_fprop(void* call_frame);
BS_API void* bs_xla_conv_fprop(void* call_frame);
BS_API void* bs_xla_conv_dgrad(void* call_frame);
BS_API void* bs_xla_conv_wgrad(void* call_frame);
BS_API void* bs_xla_lstm_forward(void* call_frame);
BS_API void* bs_xla_lstm_backward(void* call_frame);
/* (major, minor) of two versions of XLA's interface: `ours`, the newest that the handlers speak, and `theirs`, that of
 * the runtime that registered a handler last; (-1, -1) before the first. */
BS_API void bs_xla_versions(int32_t* ours, int32_t* theirs);

#ifdef __cplusplus
}
#endif

#endif /* BLOCKSPARSE_C_API_H_ */

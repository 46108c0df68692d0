// What the TensorFlow ops use of TensorFlow: its C interface for ops and kernels. No header of TensorFlow is needed and
// nothing of it is linked. The functions are looked up in the libtensorflow_framework that the process has loaded.
//
// These files are a library of their own, which calls the core through the C interface. It must be a file of its own
// because TensorFlow makes Python functions only for ops that register while it opens a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "adapters/plain_arithmetic.h"
#include "blocksparse/c_api.h"

namespace blocksparse::tensorflow {

// TensorFlow's own types, of which only pointers are passed.
struct TfStatus;
struct TfTensor;
struct TfContext;       // TF_OpKernelContext: a call
struct TfConstruction;  // TF_OpKernelConstruction: a kernel being made
struct TfOpBuilder;
struct TfKernelBuilder;
struct TfShapeContext;

struct TfAllocatorAttributes {
  size_t struct_size;
  unsigned char on_host;
};

// TF_DataType. The format of saved graphs fixes the numbers.
enum DataType : int32_t { kFloat = 1, kDouble = 2, kInt32 = 3, kUint8 = 4, kInt64 = 9, kBfloat16 = 14, kHalf = 19 };
enum Code : int32_t { kInvalidArgument = 3, kResourceExhausted = 8, kUnimplemented = 12, kInternal = 13 };

using ShapeFunction = void (*)(TfShapeContext*, TfStatus*);

struct Api {
  TfStatus* (*new_status)();
  void (*delete_status)(TfStatus*);
  void (*set_status)(TfStatus*, int32_t code, const char* message);
  int32_t (*get_code)(const TfStatus*);
  const char* (*message)(const TfStatus*);

  TfOpBuilder* (*new_op)(const char* name);
  void (*add_attribute)(TfOpBuilder*, const char* spec);
  void (*add_input)(TfOpBuilder*, const char* spec);
  void (*add_output)(TfOpBuilder*, const char* spec);
  void (*set_shape_function)(TfOpBuilder*, ShapeFunction);
  void (*register_op)(TfOpBuilder*, TfStatus*);
  void (*unknown_shape)(TfShapeContext*, TfStatus*);

  TfKernelBuilder* (*new_kernel)(const char* op, const char* device, void* (*create)(TfConstruction*),
                                 void (*compute)(void*, TfContext*), void (*destroy)(void*));
  void (*register_kernel)(const char* name, TfKernelBuilder*, TfStatus*);
  void (*construction_failure)(TfConstruction*, TfStatus*);
  bool (*has_attribute)(TfConstruction*, const char* name, TfStatus*);
  void (*attribute_size)(TfConstruction*, const char* name, int32_t* list_size, int32_t* total_size, TfStatus*);
  void (*int64_attribute)(TfConstruction*, const char* name, int64_t*, TfStatus*);
  void (*int64_list_attribute)(TfConstruction*, const char* name, int64_t*, int max, TfStatus*);
  void (*bool_attribute)(TfConstruction*, const char* name, unsigned char*, TfStatus*);

  void (*get_input)(TfContext*, int i, TfTensor**, TfStatus*);
  TfTensor* (*allocate_output)(TfContext*, int i, int32_t dtype, const int64_t* sizes, int rank, size_t bytes,
                               TfStatus*);
  TfTensor* (*allocate_temp)(TfContext*, int32_t dtype, const int64_t* sizes, int rank, TfAllocatorAttributes*,
                             TfStatus*);
  void (*context_failure)(TfContext*, TfStatus*);

  void (*delete_tensor)(TfTensor*);
  int32_t (*tensor_type)(const TfTensor*);
  int (*num_dims)(const TfTensor*);
  int64_t (*dim)(const TfTensor*, int i);
  void* (*tensor_data)(const TfTensor*);
};

extern Api api;

// Fills `api`. Returns the name of a function that is missing, or null.
const char* find_api();

// Becomes the status of the call: Python sees kInvalidArgument as tf.errors.InvalidArgumentError.
struct Failure {
  Code code;
  std::string message;
};
void require(bs_status status);  // throws the core's last error if status is not BS_OK

class StatusHandle {
 public:
  StatusHandle() : status_(api.new_status()) {}
  ~StatusHandle() { api.delete_status(status_); }
  StatusHandle(const StatusHandle&) = delete;

  operator TfStatus*() const { return status_; }  // NOLINT(google-explicit-constructor)
  void require() const;
  void set(const Failure& failure) const { api.set_status(status_, failure.code, failure.message.c_str()); }

 private:
  TfStatus* status_;
};

// A tensor of a call, released at the end. TensorFlow owns its memory: nothing is copied.
class TensorHandle {
 public:
  explicit TensorHandle(TfTensor* handle = nullptr) : handle_(handle) {}
  ~TensorHandle() {
    if (handle_ != nullptr) api.delete_tensor(handle_);
  }
  TensorHandle(TensorHandle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  TensorHandle(const TensorHandle&) = delete;

  bool given() const { return handle_ != nullptr; }
  int32_t dtype() const { return api.tensor_type(handle_); }
  void* data() const { return api.tensor_data(handle_); }
  std::vector<int64_t> sizes() const;

 private:
  TfTensor* handle_;
};

class Call {
 public:
  explicit Call(TfContext* context) : context_(context) {}

  TensorHandle next_input();
  TensorHandle next_optional(int64_t count);  // a list of no tensor or one
  TensorHandle output(int i, int32_t dtype, std::span<const int64_t> sizes);
  TensorHandle temporary(size_t bytes);

 private:
  TfContext* context_;
  StatusHandle status_;
  int next_ = 0;
};

// The attributes of an op, read when its kernel is made. An op has some of them.
struct Attributes {
  bool transposed = false;        // the layout is that of W^T
  bool features_first = false;    // x is [features, tokens...]
  bool channels_last = false;     // images are [n, size..., channels]
  bool gate_gradient = false;     // the gradient of gates is wanted
  int64_t gates = 0, biases = 0;  // tensors in lists of none or one
  int64_t orders = 0, lengths = 0;
  // Whether the convolution is transposed (0 or 1). Then, for each size: kernel, stride, dilation, padding before,
  // padding after, output padding.
  std::vector<int64_t> geometry;
};

bs_tensor view(const TensorHandle& tensor, const char* op);  // contiguous
// Activations as [tokens, features]: x is [..., features], or [features, ...] if features-first.
bs_tensor tokens_view(const TensorHandle& tensor, const char* op, bool features_first);
int32_t bs_dtype_of(int32_t dtype, const char* op);
int32_t sum_dtype_of(int32_t dtype);  // the type of sums and gates: kDouble for kDouble, otherwise kFloat
std::string sizes_text(std::span<const int64_t> sizes);

// The layout whose tables `index` holds.
bs_layout_view layout_view(const TensorHandle& index, bool transposed);

bs_stream stream();

// Runs body(workspace) with `bytes` bytes. A small workspace belongs to the thread, a larger one comes from
// TensorFlow's allocator.
inline constexpr size_t kSmallWorkspace = 16384;
void* small_workspace();
template <class Body>
void with_workspace(Call& call, size_t bytes, Body&& body) {
  if (bytes <= kSmallWorkspace) {
    body(bs_workspace{small_workspace(), bytes});
    return;
  }
  const TensorHandle memory = call.temporary(bytes);
  body(bs_workspace{memory.data(), bytes});
}

struct Op {
  const char* name;
  std::vector<const char*> inputs, outputs, attributes;
  void (*compute)(void* kernel, TfContext* context);
};

// The body of an op as TensorFlow calls it. An exception becomes the status of the call.
void report(TfContext* context, const Failure& failure);
template <void (*body)(const Attributes&, Call&)>
void compute(void* kernel, TfContext* context) {
  try {
    const PlainArithmetic plain;
    Call call(context);
    body(*static_cast<const Attributes*>(kernel), call);
  } catch (const Failure& failure) {
    report(context, failure);
  } catch (const std::exception& error) {
    report(context, {kResourceExhausted, error.what()});
  }
}

std::vector<Op> linear_ops();
std::vector<Op> conv_ops();
std::vector<Op> lstm_ops();

// Attribute specifications that ops share. S is the type of gates.
inline constexpr const char* kType = "T: {bfloat16, half, float, double}";
inline constexpr const char* kSumType = "S: {float, double} = DT_FLOAT";

}  // namespace blocksparse::tensorflow

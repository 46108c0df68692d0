// What the TensorFlow ops need of TensorFlow, by its C interface for ops and kernels. No header of TensorFlow is needed
// and nothing of it is linked: the functions are looked up in the libtensorflow_framework that the process has loaded.
//
// These files are a library of their own, which calls the core through the C interface: TensorFlow makes Python
// functions only for ops that register while it opens a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "adapters/plain_arithmetic.h"
#include "blocksparse/c_api.h"

namespace blocksparse::tensorflow {

// TensorFlow's own types, which only pointers are passed of.
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

// TF_DataType, which is fixed by the format of saved graphs.
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

// Fills `api`; the name of what is missing, or null.
const char* find_api();

// Left to TensorFlow as the status of the call: Python sees kInvalidArgument as tf.errors.InvalidArgumentError.
struct Failure {
  Code code;
  std::string message;
};
void require(bs_status status);  // of the core: its last error

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

// A tensor of a call, given back at the end. Its memory is TensorFlow's own: nothing is copied.
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
  TensorHandle next_optional(int64_t count);  // a list of none or one
  TensorHandle output(int i, int32_t dtype, std::span<const int64_t> sizes);
  TensorHandle temporary(size_t bytes);

 private:
  TfContext* context_;
  StatusHandle status_;
  int next_ = 0;
};

// The attributes of an op, read when its kernel is made. Ops have some of them.
struct Attributes {
  bool transposed = false;        // W^T of the layout is meant
  bool features_first = false;    // x is [features, tokens...]
  bool channels_last = false;     // images are [n, size..., channels]
  bool gate_gradient = false;     // the gradient of gates is wanted
  int64_t gates = 0, biases = 0;  // how many tensors there are in lists of none or one
  int64_t orders = 0, lengths = 0;
  // Whether transposed; then, for each size, kernel, stride, dilation, padding before and after, output padding.
  std::vector<int64_t> geometry;
};

bs_tensor view(const TensorHandle& tensor, const char* op);  // contiguous
// Runs of features as [tokens, features]: x [..., features], or [features, ...].
bs_tensor tokens_view(const TensorHandle& tensor, const char* op, bool features_first);
int32_t bs_dtype_of(int32_t dtype, const char* op);
int32_t sum_dtype_of(int32_t dtype);  // of sums and gates: kDouble for kDouble, else kFloat
std::string sizes_text(std::span<const int64_t> sizes);

// The layout whose tables `index` holds.
bs_layout_view layout_view(const TensorHandle& index, bool transposed);

bs_stream stream();

// Runs body(workspace) with so many bytes: a small workspace is the thread's own, others are of TensorFlow's allocator.
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

// The body of an op as TensorFlow calls it: what it throws becomes the call's failure.
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

// Specifications that ops share. S is the type of gates.
inline constexpr const char* kType = "T: {bfloat16, half, float, double}";
inline constexpr const char* kSumType = "S: {float, double} = DT_FLOAT";

}  // namespace blocksparse::tensorflow

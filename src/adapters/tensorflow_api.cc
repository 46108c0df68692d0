#include "adapters/tensorflow_api.h"

#include <dlfcn.h>

#include <algorithm>

#include "core/text.h"

namespace blocksparse::tensorflow {

Api api;

const char* find_api() {
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "libtensorflow_framework.so.2 is not loaded";
  const char* missing = nullptr;
  const auto need = [&]<class Function>(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  need("TF_NewStatus", api.new_status);
  need("TF_DeleteStatus", api.delete_status);
  need("TF_SetStatus", api.set_status);
  need("TF_GetCode", api.get_code);
  need("TF_Message", api.message);
  need("TF_NewOpDefinitionBuilder", api.new_op);
  need("TF_OpDefinitionBuilderAddAttr", api.add_attribute);
  need("TF_OpDefinitionBuilderAddInput", api.add_input);
  need("TF_OpDefinitionBuilderAddOutput", api.add_output);
  need("TF_OpDefinitionBuilderSetShapeInferenceFunction", api.set_shape_function);
  need("TF_RegisterOpDefinition", api.register_op);
  need("TF_ShapeInferenceContextSetUnknownShape", api.unknown_shape);
  need("TF_NewKernelBuilder", api.new_kernel);
  need("TF_RegisterKernelBuilder", api.register_kernel);
  need("TF_OpKernelConstruction_Failure", api.construction_failure);
  need("TF_OpKernelConstruction_HasAttr", api.has_attribute);
  need("TF_OpKernelConstruction_GetAttrSize", api.attribute_size);
  need("TF_OpKernelConstruction_GetAttrInt64", api.int64_attribute);
  need("TF_OpKernelConstruction_GetAttrInt64List", api.int64_list_attribute);
  need("TF_OpKernelConstruction_GetAttrBool", api.bool_attribute);
  need("TF_GetInput", api.get_input);
  need("TF_AllocateOutput", api.allocate_output);
  need("TF_AllocateTemp", api.allocate_temp);
  need("TF_OpKernelContext_Failure", api.context_failure);
  need("TF_DeleteTensor", api.delete_tensor);
  need("TF_TensorType", api.tensor_type);
  need("TF_NumDims", api.num_dims);
  need("TF_Dim", api.dim);
  need("TF_TensorData", api.tensor_data);
  return missing;
}

void require(bs_status status) {
  if (status == BS_OK) return;
  const Code code = status == BS_INVALID_ARGUMENT ? kInvalidArgument
                    : status == BS_OUT_OF_MEMORY  ? kResourceExhausted
                                                  : kUnimplemented;
  throw Failure{code, bs_last_error()};
}

void StatusHandle::require() const {
  if (const int32_t code = api.get_code(status_); code != 0)
    throw Failure{static_cast<Code>(code), api.message(status_)};
}

void report(TfContext* context, const Failure& failure) {
  const StatusHandle status;
  status.set(failure);
  api.context_failure(context, status);
}

// ---- Tensors of a call ----------------------------------------------------------------------------------------------

std::vector<int64_t> TensorHandle::sizes() const {
  std::vector<int64_t> sizes(static_cast<size_t>(api.num_dims(handle_)));
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = api.dim(handle_, static_cast<int>(i));
  return sizes;
}

TensorHandle Call::next_input() {
  TfTensor* tensor = nullptr;
  api.get_input(context_, next_++, &tensor, status_);
  TensorHandle handle(tensor);
  status_.require();
  return handle;
}

TensorHandle Call::next_optional(int64_t count) { return count == 0 ? TensorHandle() : next_input(); }

TensorHandle Call::output(int i, int32_t dtype, std::span<const int64_t> sizes) {
  size_t bytes = dtype == kDouble ? 8 : dtype == kFloat ? 4 : 2;
  bool too_large = false;  // TensorFlow would end the process instead of reporting it
  for (const int64_t size : sizes) too_large = too_large || __builtin_mul_overflow(bytes, size, &bytes);
  if (too_large) {
    throw Failure{kInvalidArgument, concat("a result of ", sizes_text(sizes), " does not fit into memory")};
  }
  TensorHandle handle(
      api.allocate_output(context_, i, dtype, sizes.data(), static_cast<int>(sizes.size()), bytes, status_));
  status_.require();
  return handle;
}

TensorHandle Call::temporary(size_t bytes) {
  TfAllocatorAttributes on_host{offsetof(TfAllocatorAttributes, on_host) + 1, 1};
  const auto size = static_cast<int64_t>(bytes);
  TensorHandle handle(api.allocate_temp(context_, kUint8, &size, 1, &on_host, status_));
  status_.require();
  return handle;
}

void* small_workspace() {
  alignas(64) static thread_local char memory[kSmallWorkspace];
  return memory;
}

std::string sizes_text(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += concat(text.size() > 1 ? ", " : "", size);
  return text + "]";
}

int32_t bs_dtype_of(int32_t dtype, const char* op) {
  switch (dtype) {
    case kFloat: return BS_F32;
    case kDouble: return BS_F64;
    case kBfloat16: return BS_BF16;
    case kHalf: return BS_F16;
    default:
      throw Failure{kInvalidArgument, concat("[", op, "] a tensor of TensorFlow's type ", dtype,
                                             ", needs float32, float64, bfloat16 or float16")};
  }
}

int32_t sum_dtype_of(int32_t dtype) { return dtype == kDouble ? kDouble : kFloat; }

bs_tensor view(const TensorHandle& tensor, const char* op) {
  const std::vector<int64_t> sizes = tensor.sizes();
  if (sizes.size() > BS_MAX_RANK) {
    throw Failure{kInvalidArgument,
                  concat("[", op, "] a tensor of ", sizes.size(), " dimensions, needs ", BS_MAX_RANK, " or fewer")};
  }
  bs_tensor made{.data = tensor.data(),
                 .dtype = bs_dtype_of(tensor.dtype(), op),
                 .device_type = BS_CPU,
                 .device_index = 0,
                 .rank = static_cast<int32_t>(sizes.size()),
                 .shape = {},
                 .stride = {}};
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[i]) {
    made.shape[i] = sizes[i];
    made.stride[i] = step;
  }
  return made;
}

bs_tensor tokens_view(const TensorHandle& tensor, const char* op, bool features_first) {
  const std::vector<int64_t> sizes = tensor.sizes();
  if (sizes.empty()) throw Failure{kInvalidArgument, concat("[", op, "] x is a scalar, needs [..., features]")};
  int64_t tokens = 1;
  for (size_t i = 1; i < sizes.size(); ++i) tokens *= sizes[features_first ? i : i - 1];
  const int64_t features = features_first ? sizes.front() : sizes.back();
  return {.data = tensor.data(),
          .dtype = bs_dtype_of(tensor.dtype(), op),
          .device_type = BS_CPU,
          .device_index = 0,
          .rank = 2,
          .shape = {tokens, features},
          .stride = {features_first ? 1 : features, features_first ? tokens : 1}};
}

bs_layout_view layout_view(const TensorHandle& index, bool transposed) {
  const std::vector<int64_t> sizes = index.sizes();
  if (index.dtype() != kInt32 || sizes.size() != 1) {
    throw Failure{kInvalidArgument,
                  concat("[layout] index is ", sizes_text(sizes), ", needs the int32 words of a layout")};
  }
  bs_layout_view made;
  require(bs_layout_view_from_index(static_cast<const int32_t*>(index.data()), sizes[0], &made));
  made.transposed = transposed ? 1 : 0;
  return made;
}

}  // namespace blocksparse::tensorflow

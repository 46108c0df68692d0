#include "adapters/torch_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "core/text.h"

namespace blocksparse::pytorch {

Api api;

namespace {

void* loaded(const char* library) { return dlopen(library, RTLD_LAZY | RTLD_NOLOAD); }

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

int32_t code(void* library, const std::string& name) {
  int32_t (*function)() = nullptr;
  return find(library, ("aoti_torch_" + name).c_str(), function) ? function() : -1;
}

}  // namespace

const char* find_api() {
  void* library = loaded("libtorch_cpu.so");
  if (library == nullptr) return "libtorch_cpu.so is not loaded";
  const char* missing = nullptr;
  const auto need = [&](const char* name, auto& function) {
    if (!find(library, name, function)) missing = name;
  };
  need("aoti_torch_library_init_impl", api.library_init_impl);
  need("aoti_torch_library_impl", api.library_impl);
  need("aoti_torch_delete_tensor_object", api.delete_tensor);
  need("aoti_torch_get_data_ptr", api.data_ptr);
  need("aoti_torch_get_dim", api.dim);
  need("aoti_torch_get_sizes", api.sizes);
  need("aoti_torch_get_strides", api.strides);
  need("aoti_torch_get_dtype", api.dtype);
  need("aoti_torch_empty_strided", api.empty_strided);
  need("aoti_torch_get_device_type", api.device_type);
  need("aoti_torch_get_device_index", api.device_index);
  find(library, "torch_get_num_threads", api.num_threads);
  find(library, "torch_list_size", api.list_size);
  find(library, "torch_list_get_item", api.list_item);
  find(library, "torch_delete_list", api.delete_list);
  find(library, "torch_exception_get_what_without_backtrace", api.what);
  api.dtypes = {code(library, "dtype_float32"), code(library, "dtype_float64"), code(library, "dtype_bfloat16"),
                code(library, "dtype_float16")};
  api.int32_code = code(library, "dtype_int32");
  api.int64_code = code(library, "dtype_int64");
  api.uint8_code = code(library, "dtype_uint8");
  api.cpu_code = code(library, "device_type_cpu");
  api.cuda_code = code(library, "device_type_cuda");
  const auto codes = {api.dtypes[0],  api.dtypes[1],  api.dtypes[2], api.dtypes[3], api.int32_code,
                      api.int64_code, api.uint8_code, api.cpu_code,  api.cuda_code};
  if (std::ranges::count(codes, -1) > 0) missing = "aoti_torch_dtype_*, aoti_torch_device_type_*";
  return missing;
}

const char* find_cuda() {
  void* library = loaded("libtorch_cuda.so");
  if (library == nullptr) return "libtorch_cuda.so is not loaded";
  const char* name = "aoti_torch_get_current_cuda_stream";
  return find(library, name, api.current_cuda_stream) ? nullptr : name;
}

void raise(const Status& status) {
  if (status.code() == StatusCode::invalid_argument) throw std::invalid_argument(status.message());
  throw std::runtime_error(status.message());
}

void require(const Status& status) {
  if (!status.ok()) raise(status);
}

void check(int32_t error) {
  if (error == 0) return;
  const char* what = api.what == nullptr ? nullptr : api.what();
  throw std::runtime_error(
      concat("PyTorch refused a call of its C interface", what == nullptr ? "" : ": ", what == nullptr ? "" : what));
}

// ---- Tensors and lists ----------------------------------------------------------------------------------------------

Word TensorHandle::release() { return reinterpret_cast<Word>(std::exchange(handle_, nullptr)); }

void* TensorHandle::data() const {
  void* data = nullptr;
  check(api.data_ptr(handle_, &data));
  return data;
}

int32_t TensorHandle::dtype() const {
  int32_t dtype = 0;
  check(api.dtype(handle_, &dtype));
  return dtype;
}

std::span<const int64_t> TensorHandle::sizes() const {
  int64_t rank = 0, *sizes = nullptr;
  check(api.dim(handle_, &rank));
  check(api.sizes(handle_, &sizes));
  return {sizes, static_cast<size_t>(rank)};
}

std::span<const int64_t> TensorHandle::strides() const {
  int64_t rank = 0, *strides = nullptr;
  check(api.dim(handle_, &rank));
  check(api.strides(handle_, &strides));
  return {strides, static_cast<size_t>(rank)};
}

Device TensorHandle::device(const char* op) const {
  int32_t type = 0, index = 0;
  check(api.device_type(handle_, &type));
  if (type == api.cpu_code) return {};
  check(api.device_index(handle_, &index));
  if (type == api.cuda_code) return {DeviceType::cuda, index};
  raise(invalid("[", op, "] a tensor is on a device that is neither the CPU nor CUDA"));
}

Tensor TensorHandle::view(const char* op) const {
  Tensor tensor;
  if (!given()) return tensor;
  const auto shape = sizes(), stride = strides();
  if (shape.size() > kMaxRank) {
    raise(invalid("[", op, "] a tensor of ", shape.size(), " dimensions, at most ", kMaxRank, " are possible"));
  }
  const int32_t code = dtype();
  const auto* found = std::ranges::find(api.dtypes, code);
  if (found == api.dtypes.end()) {
    raise(invalid("[", op, "] a tensor of ", dtype_name(code),
                  ", needs one of torch.float32, torch.float64, torch.bfloat16, torch.float16"));
  }
  tensor.data = data();
  tensor.dtype = static_cast<DType>(found - api.dtypes.begin());
  tensor.device = device(op);
  tensor.rank = static_cast<int32_t>(shape.size());
  std::ranges::copy(shape, tensor.shape.begin());
  std::ranges::copy(stride, tensor.stride.begin());
  return tensor;
}

TensorHandle take_optional(Word word) {
  if (word == 0) return TensorHandle();
  const auto* held = reinterpret_cast<Word*>(word);
  TensorHandle tensor(*held);
  delete held;
  return tensor;
}

std::vector<int64_t> take_list(Word word) {
  const auto list = reinterpret_cast<Handle>(word);
  size_t size = 0;
  int32_t error = api.list_size(list, &size);
  std::vector<int64_t> numbers;
  numbers.reserve(error == 0 ? size : 0);
  for (size_t i = 0; i < size && error == 0; ++i) {
    Word item = 0;
    error = api.list_item(list, i, &item);
    numbers.push_back(static_cast<int64_t>(item));
  }
  api.delete_list(list);
  check(error);
  return numbers;
}

std::string dtype_name(int32_t wanted) {
  for (const char* name : {"float32", "float64", "bfloat16", "float16", "uint8", "int8", "int16", "int32", "int64",
                           "bool", "complex32", "complex64", "complex128"}) {
    if (code(loaded("libtorch_cpu.so"), concat("dtype_", name)) == wanted) return concat("torch.", name);
  }
  return "another dtype";
}

std::string sizes_text(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += concat(i == 0 ? "" : ", ", sizes[i]);
  return text + "]";
}

int64_t times(int64_t step, int64_t size) {
  int64_t product = 0;
  if (__builtin_mul_overflow(step, size, &product))
    raise({StatusCode::out_of_memory, "a tensor of more than 2^63 elements"});
  return product;
}

TensorHandle empty(std::span<const int64_t> sizes, std::span<const int64_t> strides, int32_t code, Device device) {
  Handle tensor = nullptr;
  const bool on_card = device.type == DeviceType::cuda;
  check(api.empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), code,
                          on_card ? api.cuda_code : api.cpu_code, on_card ? device.index : -1, &tensor));
  return TensorHandle(reinterpret_cast<Word>(tensor));
}

TensorHandle empty_contiguous(std::span<const int64_t> sizes, int32_t code, Device device) {
  std::array<int64_t, kMaxRank> strides = {};
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step = times(step, std::max<int64_t>(sizes[i], 1));
  }
  return empty(sizes, {strides.data(), sizes.size()}, code, device);
}

// ---- What ops share -------------------------------------------------------------------------------------------------

namespace {
std::string device_text(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : concat("cuda:", device.index);
}
}  // namespace

void check_devices(const char* op, const TensorHandle& x, std::initializer_list<const TensorHandle*> others) {
  const Device needed = x.device(op);
  for (const TensorHandle* other : others) {
    if (!other->given() || other->device(op) == needed) continue;
    raise(invalid("[", op, "] a tensor is on ", device_text(other->device(op)), ", needs ", device_text(needed),
                  ", where x is"));
  }
}

LayoutView view_of(const char* op, const TensorHandle& index, bool transposed, LayoutView::Sizes sizes) {
  const auto shape = index.sizes(), strides = index.strides();
  if (shape.size() != 1 || index.dtype() != api.int32_code || strides[0] != 1) {
    raise(invalid("[", op, "] index is ", dtype_name(index.dtype()), " ", sizes_text(shape),
                  ", needs the int32 tensor that belongs to the layout"));
  }
  const std::span words(static_cast<const int32_t*>(index.data()), static_cast<size_t>(shape[0]));
  const Device device = index.device(op);
  if (transposed) std::swap(sizes.out_features, sizes.in_features);
  auto view =
      device.type == DeviceType::cpu ? LayoutView::from_index(words) : LayoutView::on_device(words, sizes, device);
  if (!view.ok()) raise(view.status());
  view->transposed = transposed;
  return *view;
}

Stream stream(const char* op, Device device, bool tf32) {
  const Math math = tf32 ? Math::tf32 : Math::ieee;
  if (device.type == DeviceType::cuda) {
    void* handle = nullptr;
    if (api.current_cuda_stream == nullptr)
      raise({StatusCode::unavailable, concat("[", op, "] this PyTorch has no CUDA")});
    check(api.current_cuda_stream(device.index, &handle));
    return {.handle = handle, .threads = 0, .math = math};
  }
  uint32_t threads = 0;
  if (api.num_threads != nullptr) check(api.num_threads(&threads));
  return {.handle = nullptr, .threads = static_cast<int32_t>(threads), .math = math};
}

}  // namespace blocksparse::pytorch

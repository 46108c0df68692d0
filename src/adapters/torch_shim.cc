// The PyTorch ops as C++ kernels, through PyTorch's stable C interface (torch >= 2.9). No header of PyTorch is needed
// and nothing is linked: the functions are looked up in the libtorch that the process has loaded. Without them the
// Python package registers its own kernels; these only save their overhead (op call on a 2-core VM: 3 us against 30).
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "blocksparse/blocksparse.h"
#include "blocksparse/c_api.h"

namespace {

using namespace blocksparse;  // NOLINT(google-build-using-namespace)

// ---- PyTorch's side: handles, and 64-bit words on a stack -----------------------------------------------------------

using Handle = void*;
using Word = uint64_t;
using Kernel = void (*)(Word* stack, uint64_t inputs, uint64_t outputs);

struct Torch {
  int32_t (*library_init_impl)(const char* name_space, const char* key, const char* file, uint32_t line,
                               Handle* library);
  int32_t (*library_impl)(Handle library, const char* op, Kernel kernel);
  int32_t (*delete_tensor)(Handle tensor);
  int32_t (*data_ptr)(Handle tensor, void** data);
  int32_t (*dim)(Handle tensor, int64_t* dim);
  int32_t (*sizes)(Handle tensor, int64_t** sizes);
  int32_t (*strides)(Handle tensor, int64_t** strides);
  int32_t (*dtype)(Handle tensor, int32_t* dtype);
  int32_t (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                           int32_t device_type, int32_t device_index, Handle* tensor);
  int32_t (*device_type)(Handle tensor, int32_t* type);
  int32_t (*device_index)(Handle tensor, int32_t* index);
  int32_t (*num_threads)(uint32_t* threads);                      // null before torch 2.10
  int32_t (*current_cuda_stream)(int32_t device, void** stream);  // null without CUDA
  std::array<int32_t, 4> dtypes;                                  // PyTorch's code of each DType
  int32_t int32_code, uint8_code, cpu_code, cuda_code;
};

Torch torch;

// Fills `torch`; the name of what is missing otherwise.
const char* find_torch() {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "libtorch_cpu.so is not loaded";
  const char* missing = nullptr;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = name;
  };
  auto code = [&](const char* name) {
    int32_t (*function)() = nullptr;
    find(function, name);
    return function == nullptr ? -1 : function();
  };
  find(torch.library_init_impl, "aoti_torch_library_init_impl");
  find(torch.library_impl, "aoti_torch_library_impl");
  find(torch.delete_tensor, "aoti_torch_delete_tensor_object");
  find(torch.data_ptr, "aoti_torch_get_data_ptr");
  find(torch.dim, "aoti_torch_get_dim");
  find(torch.sizes, "aoti_torch_get_sizes");
  find(torch.strides, "aoti_torch_get_strides");
  find(torch.dtype, "aoti_torch_get_dtype");
  find(torch.empty_strided, "aoti_torch_empty_strided");
  torch.dtypes = {code("aoti_torch_dtype_float32"), code("aoti_torch_dtype_float64"), code("aoti_torch_dtype_bfloat16"),
                  code("aoti_torch_dtype_float16")};
  torch.int32_code = code("aoti_torch_dtype_int32");
  torch.uint8_code = code("aoti_torch_dtype_uint8");
  torch.cpu_code = code("aoti_torch_device_type_cpu");
  torch.cuda_code = code("aoti_torch_device_type_cuda");
  find(torch.device_type, "aoti_torch_get_device_type");
  find(torch.device_index, "aoti_torch_get_device_index");
  const char* needed = missing;
  find(torch.num_threads, "torch_get_num_threads");
  return needed;
}

// Exceptions go through PyTorch's dispatcher; Python sees std::invalid_argument as ValueError.
[[noreturn]] void raise(const Status& status) {
  if (status.code() == StatusCode::invalid_argument) throw std::invalid_argument(status.message());
  throw std::runtime_error(status.message());
}

void check(int32_t error) {
  if (error != 0) throw std::runtime_error("[linear] PyTorch refused a call of its C interface");
}

// A tensor handle of ours, given back at the end.
class TensorHandle {
 public:
  explicit TensorHandle(Word word = 0) : handle_(reinterpret_cast<Handle>(word)) {}
  ~TensorHandle() {
    if (handle_ != nullptr) torch.delete_tensor(handle_);
  }
  TensorHandle(TensorHandle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  TensorHandle(const TensorHandle&) = delete;

  Handle get() const { return handle_; }
  bool given() const { return handle_ != nullptr; }
  Word release() {
    const Handle handle = handle_;
    handle_ = nullptr;
    return reinterpret_cast<Word>(handle);
  }

  void* data() const {
    void* data = nullptr;
    check(torch.data_ptr(handle_, &data));
    return data;
  }
  Device device() const {
    int32_t type = 0, index = 0;
    check(torch.device_type(handle_, &type));
    if (type == torch.cpu_code) return {};
    check(torch.device_index(handle_, &index));
    if (type == torch.cuda_code) return {DeviceType::cuda, index};
    raise({StatusCode::invalid_argument, "[linear] a tensor is on a device that is neither the CPU nor CUDA"});
  }
  int32_t dtype() const {
    int32_t dtype = 0;
    check(torch.dtype(handle_, &dtype));
    return dtype;
  }

  Tensor view() const {
    Tensor tensor;
    if (!given()) return tensor;
    int64_t rank = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    check(torch.dim(handle_, &rank));
    check(torch.sizes(handle_, &sizes));
    check(torch.strides(handle_, &strides));
    if (rank > kMaxRank) {
      raise({StatusCode::invalid_argument, "[linear] a tensor of " + std::to_string(rank) + " dimensions, at most " +
                                               std::to_string(kMaxRank) + " are possible"});
    }
    tensor.data = data();
    tensor.device = device();
    tensor.rank = static_cast<int32_t>(rank);
    for (size_t i = 0; i < static_cast<size_t>(rank); ++i) {
      tensor.shape[i] = sizes[i];
      tensor.stride[i] = strides[i];
    }
    const int32_t code = dtype();
    for (size_t i = 0; i < torch.dtypes.size(); ++i) {
      if (torch.dtypes[i] == code) {
        tensor.dtype = static_cast<DType>(i);
        return tensor;
      }
    }
    raise({StatusCode::invalid_argument,
           "[linear] a tensor of another dtype, needs float32, float64, bfloat16 or float16"});
  }

 private:
  Handle handle_;
};

// An optional argument is a word on the heap, ours to delete, or null.
TensorHandle take_optional(Word word) {
  if (word == 0) return TensorHandle();
  const auto* held = reinterpret_cast<Word*>(word);
  TensorHandle tensor(*held);
  delete held;
  return tensor;
}

TensorHandle empty(std::span<const int64_t> sizes, std::span<const int64_t> strides, int32_t code, Device device) {
  Handle tensor = nullptr;
  const bool on_card = device.type == DeviceType::cuda;
  check(torch.empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), code,
                            on_card ? torch.cuda_code : torch.cpu_code, on_card ? device.index : -1, &tensor));
  return TensorHandle(reinterpret_cast<Word>(tensor));
}

TensorHandle empty_array(int64_t elements, int32_t code, Device device) {
  return empty({{elements}}, {{1}}, code, device);
}

// A new tensor [..., features] like x: features-first if x is (the same rule as in _ops.py).
TensorHandle empty_like(const Tensor& x, int64_t features) {
  const int32_t code = torch.dtypes[static_cast<size_t>(x.dtype)];
  if (x.rank == 2 && x.stride[0] == 1 && x.stride[1] != 1 && x.shape[0] > 1) {
    return empty({{x.shape[0], features}}, {{1, x.shape[0]}}, code, x.device);
  }
  std::array<int64_t, kMaxRank> sizes = x.shape, strides{};
  if (x.rank > 0) sizes[static_cast<size_t>(x.rank) - 1] = features;
  int64_t step = 1;
  for (int32_t i = x.rank; i-- > 0;) {
    strides[static_cast<size_t>(i)] = step;
    step *= std::max<int64_t>(sizes[static_cast<size_t>(i)], 1);
  }
  const auto rank = static_cast<size_t>(x.rank);
  return empty({sizes.data(), rank}, {strides.data(), rank}, code, x.device);
}

int64_t width_of(const ConstTensor& x) { return x.rank > 0 ? x.shape[static_cast<size_t>(x.rank) - 1] : 0; }

// The sizes as they are meant, transposed or not: tables on a card cannot be asked.
LayoutView view_of(const TensorHandle& index, bool transposed, LayoutView::Sizes sizes) {
  int64_t rank = 0;
  int64_t *shape = nullptr, *strides = nullptr;
  check(torch.dim(index.get(), &rank));
  check(torch.sizes(index.get(), &shape));
  check(torch.strides(index.get(), &strides));
  if (rank != 1 || index.dtype() != torch.int32_code || strides[0] != 1) {
    raise({StatusCode::invalid_argument, "[linear] index needs to be the int32 tensor that belongs to the layout"});
  }
  const std::span words(static_cast<const int32_t*>(index.data()), static_cast<size_t>(shape[0]));
  const Device device = index.device();
  if (transposed) std::swap(sizes.out_features, sizes.in_features);
  auto view =
      device.type == DeviceType::cpu ? LayoutView::from_index(words) : LayoutView::on_device(words, sizes, device);
  if (!view.ok()) raise(view.status());
  view->transposed = transposed;
  return *view;
}

int64_t tokens_of(const ConstTensor& x) {
  int64_t n = 1;
  for (int32_t i = 0; i + 1 < x.rank; ++i) n *= x.shape[static_cast<size_t>(i)];
  return n;
}

// The blocks of W, and the size of one.
std::array<int64_t, 2> blocks_of(const ConstTensor& values) {
  if (values.rank == 3) return {values.shape[0], values.shape[1]};
  raise({StatusCode::invalid_argument,
         "[linear] values have " + std::to_string(values.rank) + " dimensions, needs [blocks, b, b]"});
}

LayoutView::Sizes sizes_of(const std::array<int64_t, 2>& blocks, int64_t out_features, int64_t in_features) {
  return {static_cast<int32_t>(std::clamp<int64_t>(blocks[1], 0, 256)), out_features, in_features, blocks[0]};
}

Stream stream(Device device, bool tf32) {
  const Math math = tf32 ? Math::tf32 : Math::ieee;
  if (device.type == DeviceType::cuda) {
    void* handle = nullptr;
    if (torch.current_cuda_stream == nullptr) raise({StatusCode::unavailable, "[linear] this PyTorch has no CUDA"});
    check(torch.current_cuda_stream(device.index, &handle));
    return {.handle = handle, .threads = 0, .math = math};
  }
  uint32_t threads = 0;
  if (torch.num_threads != nullptr) check(torch.num_threads(&threads));
  return {.handle = nullptr, .threads = static_cast<int32_t>(threads), .math = math};
}

// Runs body(workspace) with so many bytes: a small workspace on the CPU is the thread's own, others are of PyTorch's
// allocator.
template <class Body>
void with_workspace(size_t bytes, Device device, Body&& body) {
  constexpr size_t kSmall = 16384;
  if (bytes == 0) {
    body(Workspace{});
    return;
  }
  if (bytes <= kSmall && device.type == DeviceType::cpu) {
    alignas(64) static thread_local char small[kSmall];
    body(Workspace{small, bytes});
    return;
  }
  const TensorHandle memory = empty_array(static_cast<int64_t>(bytes), torch.uint8_code, device);
  body(Workspace{memory.data(), bytes});
}

void require(const Status& status) {
  if (!status.ok()) raise(status);
}

// ---- The kernels; arguments in the order of the schemas in _ops.py --------------------------------------------------

Word product(const TensorHandle& index, bool transposed, const TensorHandle& x, int64_t out_features, const Weights& w,
             const Epilogue& epilogue, bool tf32) {
  const Tensor xv = x.view();
  const LayoutView layout = view_of(index, transposed, sizes_of(blocks_of(w.values), out_features, width_of(xv)));
  TensorHandle y = empty_like(xv, out_features);
  const size_t bytes = linear_fprop_workspace_size(layout, xv.dtype, tokens_of(xv), xv.device);
  with_workspace(bytes, xv.device, [&](Workspace workspace) {
    require(linear_fprop(layout, xv, w, epilogue, y.view(), workspace, stream(xv.device, tf32)));
  });
  return y.release();
}

void linear(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), values(stack[1]), index(stack[2]), bias = take_optional(stack[3]);
  const auto out_features = static_cast<int64_t>(stack[4]);
  const bool tf32 = (stack[5] & 1) != 0;
  stack[0] = product(index, false, x, out_features, values.view(), {bias.view(), {}, Activation::none}, tf32);
}

void fprop(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), values(stack[1]), index(stack[2]);
  const auto out_features = static_cast<int64_t>(stack[3]);
  const bool transposed = (stack[4] & 1) != 0;
  const TensorHandle bias = take_optional(stack[5]), residual = take_optional(stack[6]),
                     gates = take_optional(stack[7]);
  const auto activation = static_cast<Activation>(stack[8]);
  const bool tf32 = (stack[9] & 1) != 0;
  stack[0] = product(index, transposed, x, out_features, {values.view(), gates.view()},
                     {bias.view(), residual.view(), activation}, tf32);
}

void dgrad(Word* stack, uint64_t, uint64_t) {
  const TensorHandle dy(stack[0]), values(stack[1]), index(stack[2]);
  const auto in_features = static_cast<int64_t>(stack[3]);
  const bool transposed = (stack[4] & 1) != 0;
  const TensorHandle gates = take_optional(stack[5]);
  const bool tf32 = (stack[6] & 1) != 0;
  const Tensor dyv = dy.view(), w = values.view();
  const LayoutView layout = view_of(index, transposed, sizes_of(blocks_of(w), width_of(dyv), in_features));
  TensorHandle dx = empty_like(dyv, in_features);
  const size_t bytes = linear_dgrad_workspace_size(layout, dyv.dtype, tokens_of(dyv), dyv.device);
  with_workspace(bytes, dyv.device, [&](Workspace workspace) {
    require(linear_dgrad(layout, dyv, {w, gates.view()}, dx.view(), workspace, stream(dyv.device, tf32)));
  });
  stack[0] = dx.release();
}

void wgrad(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), dy(stack[1]), index(stack[2]);
  const auto blocks = static_cast<int64_t>(stack[3]), b = static_cast<int64_t>(stack[4]);
  const bool transposed = (stack[5] & 1) != 0, wide = (stack[6] & 1) != 0;
  const TensorHandle values = take_optional(stack[7]), gates = take_optional(stack[8]);
  const bool gate_gradient = (stack[9] & 1) != 0, tf32 = (stack[10] & 1) != 0;
  const GradPair pair{x.view(), dy.view()};
  const Device device = pair.x.device;
  const LayoutView layout = view_of(index, transposed, sizes_of({blocks, b}, width_of(pair.dy), width_of(pair.x)));
  const DType sums = sum_dtype(pair.x.dtype), dw_dtype = wide ? sums : pair.x.dtype;
  TensorHandle dw = empty({{blocks, b, b}}, {{b * b, b, 1}}, torch.dtypes[static_cast<size_t>(dw_dtype)], device);
  TensorHandle dgates = empty_array(gate_gradient ? blocks : 0, torch.dtypes[static_cast<size_t>(sums)], device);
  const size_t bytes = linear_wgrad_workspace_size(layout, pair.x.dtype, tokens_of(pair.x), device);
  with_workspace(bytes, device, [&](Workspace workspace) {
    require(linear_wgrad(layout, {&pair, 1}, {values.view(), gates.view()}, Accumulate::no,
                         {dw.view(), gate_gradient ? dgates.view() : Tensor()}, workspace, stream(device, tf32)));
  });
  stack[0] = dw.release();
  stack[1] = dgates.release();
}

const char* register_kernels(const char* key) {
  static const char* const missing = find_torch();
  if (missing != nullptr) return missing;
  Handle library = nullptr;  // lives as long as the process, as the kernels do
  if (torch.library_init_impl("blocksparse", key, "torch_shim.cc", 1, &library) != 0 ||
      torch.library_impl(library, "linear", linear) != 0 || torch.library_impl(library, "linear_fprop", fprop) != 0 ||
      torch.library_impl(library, "linear_dgrad", dgrad) != 0 ||
      torch.library_impl(library, "linear_wgrad", wgrad) != 0) {
    return "PyTorch refused to register the kernels";
  }
  return "";
}

}  // namespace

extern "C" const char* bs_torch_register(void) {
  static const char* const answer = register_kernels("CPU");
  return answer;
}

extern "C" const char* bs_torch_register_cuda(void) {
  static const char* const answer = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return "libtorch_cuda.so is not loaded";
    torch.current_cuda_stream =
        reinterpret_cast<decltype(torch.current_cuda_stream)>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    if (torch.current_cuda_stream == nullptr) return "aoti_torch_get_current_cuda_stream";
    return register_kernels("CUDA");
  }();
  return answer;
}

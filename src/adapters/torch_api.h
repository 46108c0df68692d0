// What the PyTorch ops' C++ kernels use of PyTorch: its stable C interface (torch >= 2.9). No header of PyTorch is
// needed and nothing is linked. The functions are looked up in the libtorch that the process has loaded.
//
// A kernel finds its arguments as 64-bit words on a stack, in the order of its schema, and leaves its results on it.
// Tensors and lists among them are handles that the kernel owns. It puts all of them into the classes below before it
// does anything that could throw.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"

namespace blocksparse::pytorch {

using Handle = void*;
using Word = uint64_t;
using Kernel = void (*)(Word* stack, uint64_t inputs, uint64_t outputs);

struct Api {
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
  int32_t (*num_threads)(uint32_t* threads);  // null before torch 2.10, as the functions of lists are
  int32_t (*list_size)(Handle list, size_t* size);
  int32_t (*list_item)(Handle list, size_t index, Word* item);
  int32_t (*delete_list)(Handle list);
  const char* (*what)();                                          // null in older versions
  int32_t (*current_cuda_stream)(int32_t device, void** stream);  // null without CUDA
  std::array<int32_t, 4> dtypes;                                  // PyTorch's code of each DType
  int32_t int32_code, int64_code, uint8_code, cpu_code, cuda_code;
};

extern Api api;

// Fills `api`. Returns the name of a function that is missing, or null.
const char* find_api();
const char* find_cuda();

// Throws through PyTorch's dispatcher. Python sees std::invalid_argument as ValueError.
[[noreturn]] void raise(const Status& status);
void require(const Status& status);
void check(int32_t error);  // throws if a function of PyTorch returned an error

// An owned handle of a tensor, released at the end.
class TensorHandle {
 public:
  explicit TensorHandle(Word word = 0) : handle_(reinterpret_cast<Handle>(word)) {}
  ~TensorHandle() {
    if (handle_ != nullptr) api.delete_tensor(handle_);
  }
  TensorHandle(TensorHandle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  TensorHandle(const TensorHandle&) = delete;

  bool given() const { return handle_ != nullptr; }
  Word release();

  void* data() const;
  int32_t dtype() const;  // PyTorch's code
  std::span<const int64_t> sizes() const;
  std::span<const int64_t> strides() const;
  // `op` is the op's name, with which messages begin.
  Device device(const char* op) const;
  Tensor view(const char* op) const;  // not given: an empty one

 private:
  Handle handle_;
};

// Takes an optional argument: a word on the heap, or null.
TensorHandle take_optional(Word word);

// Takes a list of integers and releases it.
std::vector<int64_t> take_list(Word word);

std::string dtype_name(int32_t code);  // "torch.int64", for example
std::string sizes_text(std::span<const int64_t> sizes);

TensorHandle empty(std::span<const int64_t> sizes, std::span<const int64_t> strides, int32_t code, Device device);
TensorHandle empty_contiguous(std::span<const int64_t> sizes, int32_t code, Device device);
int64_t times(int64_t step, int64_t size);  // a stride; throws if the product overflows
inline int32_t code_of(DType dtype) { return api.dtypes[static_cast<size_t>(dtype)]; }

void check_devices(const char* op, const TensorHandle& x, std::initializer_list<const TensorHandle*> others);

// The layout whose tables `index` holds. `sizes` are those of the W that is meant, transposed or not: the host cannot
// read tables on a card.
LayoutView view_of(const char* op, const TensorHandle& index, bool transposed, LayoutView::Sizes sizes);

Stream stream(const char* op, Device device, bool tf32);

// Runs body(workspace) with `bytes` bytes. A small workspace on the CPU belongs to the thread, every other one comes
// from PyTorch's allocator.
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
  const TensorHandle memory = empty_contiguous({{static_cast<int64_t>(bytes)}}, api.uint8_code, device);
  body(Workspace{memory.data(), bytes});
}

inline bool flag(Word word) { return (word & 1) != 0; }

struct Row {
  const char* op;
  Kernel kernel;
};
std::span<const Row> linear_kernels();
std::span<const Row> conv_kernels();  // these take lists
std::span<const Row> lstm_kernels();
std::span<const Row> glu_kernels();

}  // namespace blocksparse::pytorch

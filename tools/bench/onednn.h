// oneDNN 3, found at run time: the part of its C API that the bench uses.
#pragma once

#include <memory>
#include <string>
#include <type_traits>

#include "blocksparse/dtype.h"
#include "opponents.h"

namespace blocksparse::bench {

// oneDNN's objects are pointers to incomplete types. Its functions return 0 for success.
using Object = void*;
enum { kRuntimeSequential = 1, kRuntimeOpenMp = 2, kRuntimeTbb = 4, kRuntimeThreadpool = 8 };
enum { kEngineCpu = 1, kStreamInOrder = 1, kAnyForm = 1 };
enum { kTypeF16 = 1, kTypeBf16 = 2, kTypeF32 = 3 };
enum { kQueryName = 8, kQuerySource = 129, kQueryWeights = 131, kQueryDiffWeights = 132, kQueryResult = 133 };
enum { kSource = 1, kResult = 17, kWeights = 33, kDiffSource = 129, kDiffResult = 145, kDiffWeights = 161 };
inline void* const kAllocate = reinterpret_cast<void*>(~uintptr_t{0});

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

struct Argument {
  int index;
  Object memory;
};

struct OneDnn {
  std::string name;  // "onednn 3.2.0"
  unsigned runtime = 0;
  Object engine = nullptr, stream = nullptr;
  const Version* (*version)() = nullptr;
  int (*engine_create)(Object*, int kind, size_t index) = nullptr;
  int (*stream_create)(Object*, Object engine, unsigned flags) = nullptr;
  int (*stream_wait)(Object) = nullptr;
  int (*strided_desc_create)(Object*, int rank, const int64_t* dims, int type, const int64_t* strides) = nullptr;
  int (*tagged_desc_create)(Object*, int rank, const int64_t* dims, int type, int tag) = nullptr;
  int (*desc_equal)(Object, Object) = nullptr;
  size_t (*desc_size)(Object) = nullptr;
  int (*desc_destroy)(Object) = nullptr;
  int (*memory_create)(Object*, Object desc, Object engine, void* data) = nullptr;
  int (*memory_destroy)(Object) = nullptr;
  int (*matmul_create)(Object*, Object engine, Object a, Object b, Object bias, Object c, Object attributes) = nullptr;
  using Sizes = const int64_t*;  // one for each axis
  int (*conv_create)(Object*, Object engine, int kind, int algorithm, Object x, Object w, Object bias, Object y,
                     Sizes stride, Sizes dilation, Sizes before, Sizes after, Object attributes) = nullptr;
  int (*conv_data_create)(Object*, Object engine, int algorithm, Object dx, Object w, Object dy, Sizes stride,
                          Sizes dilation, Sizes before, Sizes after, Object forward, Object attributes) = nullptr;
  int (*conv_weights_create)(Object*, Object engine, int algorithm, Object x, Object dw, Object dbias, Object dy,
                             Sizes stride, Sizes dilation, Sizes before, Sizes after, Object forward,
                             Object attributes) = nullptr;
  int (*reorder_create)(Object*, Object from, Object engine, Object to, Object to_engine, Object attributes) = nullptr;
  int (*plan_query)(Object plan, int what, int index, void* answer) = nullptr;
  Object (*plan_form)(Object plan, int what, int index) = nullptr;
  int (*plan_destroy)(Object) = nullptr;
  int (*primitive_create)(Object*, Object plan) = nullptr;
  int (*primitive_execute)(Object, Object stream, int count, const Argument*) = nullptr;
  int (*primitive_destroy)(Object) = nullptr;
  void (*omp_set_threads)(int) = nullptr;
  int (*omp_threads)() = nullptr;
};

// oneDNN, loaded once, or the reason why it is missing.
const Result<OneDnn>& onednn();

// Sets OpenMP's number of threads while it lives. oneDNN asks for it when it plans, and again when it runs.
class ThreadCount {
 public:
  ThreadCount(const OneDnn& dnn, int threads) : dnn_(dnn) {
    if (dnn_.omp_threads == nullptr) return;
    before_ = dnn_.omp_threads();
    dnn_.omp_set_threads(threads);
  }
  ~ThreadCount() {
    if (dnn_.omp_threads != nullptr) dnn_.omp_set_threads(before_);
  }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  const OneDnn& dnn_;
  int before_ = 1;
};

// Ok if oneDNN can be made to use exactly so many threads.
Status check_threads(const OneDnn& dnn, int threads);

using Owned = std::shared_ptr<void>;

// What `create` makes of these arguments; null if it refuses.
template <class... Parameters>
Owned make(int (*destroy)(Object), int (*create)(Object*, Parameters...),
           std::type_identity_t<Parameters>... arguments) {
  Object object = nullptr;
  if (create(&object, arguments...) != 0) return nullptr;
  return {object, destroy};
}

inline int type_of(DType dtype) { return dtype == DType::f32 ? kTypeF32 : dtype == DType::bf16 ? kTypeBf16 : kTypeF16; }

}  // namespace blocksparse::bench

#include "core/checks.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/text.h"

namespace blocksparse {

namespace {

std::string list_text(const std::array<int64_t, kMaxRank>& values, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text += concat(i == 0 ? "" : ", ", values[static_cast<size_t>(i)]);
  return text + "]";
}

std::string label(const Named& t) { return concat("[", t.op, "] ", t.name); }

// First byte and one past the last.
std::pair<uintptr_t, uintptr_t> extent(const void* data, const Matrix& m, int64_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (m.n == 0 || m.features == 0) return {begin, begin};
  const int64_t last = (m.n - 1) * m.token_stride + (m.features - 1) * m.feature_stride;
  return {begin, begin + static_cast<uintptr_t>((last + 1) * size)};
}

// Whether rows of `a_width` and of `b_width` bytes that repeat every `period` bytes never meet; b begins `shift` >= 0
// bytes after a.
bool rows_interleave(int64_t shift, int64_t period, int64_t a_width, int64_t b_width) {
  const int64_t offset = shift % period;
  return offset >= a_width && offset + b_width <= period;
}

}  // namespace

std::string shape_text(const ConstTensor& tensor) { return list_text(tensor.shape, tensor.rank); }
std::string strides_text(const ConstTensor& tensor) { return list_text(tensor.stride, tensor.rank); }

Status check_tensor(const Named& t) {
  const ConstTensor& x = t.tensor;
  if (x.rank < 1 || x.rank > kMaxRank) return invalid(label(t), " has ", x.rank, " dimensions, needs 1 to ", kMaxRank);
  if (size_of(x.dtype) == 0) return invalid(label(t), " has the unknown dtype ", static_cast<int32_t>(x.dtype));
  BS_RETURN_IF_ERROR(check_device_type(t.op, x.device));
  bool empty = false;
  int64_t elements = 1;
  double last = 0;  // offset of the last element; no overflow
  for (int i = 0; i < x.rank; ++i) {
    const int64_t dim = x.shape[static_cast<size_t>(i)];
    if (dim < 0) return invalid(label(t), " is ", shape_text(x), ", dimensions need to be 0 or more");
    if (x.stride[static_cast<size_t>(i)] < 0) {
      return invalid(label(t), " has strides ", strides_text(x), ", needs 0 or more");
    }
    empty = empty || dim == 0;
    if (!empty && elements > std::numeric_limits<int64_t>::max() / 16 / dim) {
      return invalid(label(t), " is ", shape_text(x), ", too large");
    }
    elements *= empty ? 1 : dim;
    last += static_cast<double>(dim - 1) * static_cast<double>(x.stride[static_cast<size_t>(i)]);
  }
  if (!empty && last > 0x1p58) return invalid(label(t), " has strides ", strides_text(x), ", too large");
  if (x.data == nullptr && !empty) return invalid(label(t), " is ", shape_text(x), " but its pointer is null");
  if (reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(size_of(x.dtype)) != 0) {
    return invalid(label(t), " is not aligned to its elements of ", size_of(x.dtype), " bytes");
  }
  return {};
}

Status check_dtype(const Named& t, DType needed) {
  if (t.tensor.dtype == needed) return {};
  return invalid(label(t), " is ", name_of(t.tensor.dtype), ", needs ", name_of(needed));
}

Status check_gradient_dtype(const Named& t, DType dtype) {
  const DType sums = sum_dtype(dtype);
  if (!t.tensor.given() || t.tensor.dtype == dtype || t.tensor.dtype == sums) return {};
  const std::string other = dtype == sums ? "" : concat(" or ", name_of(dtype));
  return invalid(label(t), " is ", name_of(t.tensor.dtype), ", needs ", name_of(sums), other);
}

Status check_device_type(const char* op, Device device) {
  if (device.type == DeviceType::cpu || device.type == DeviceType::cuda) return {};
  return invalid("[", op, "] a tensor's device type is ", static_cast<int32_t>(device.type),
                 ", needs 0 (CPU) or 1 (CUDA)");
}

Status check_device(const Named& t, Device needed) {
  if (t.tensor.device == needed) return {};
  auto text = [](Device d) { return d.type == DeviceType::cpu ? std::string("the CPU") : concat("cuda:", d.index); };
  return invalid(label(t), " is on ", text(t.tensor.device), ", needs ", text(needed));
}

Status check_contiguous(const Named& t, std::initializer_list<int64_t> shape) {
  BS_RETURN_IF_ERROR(check_tensor(t));
  const ConstTensor& x = t.tensor;
  const ConstTensor needed(nullptr, x.dtype, shape);
  bool same = x.rank == needed.rank;
  for (size_t i = 0; same && i < shape.size(); ++i) same = x.shape[i] == needed.shape[i];
  if (!same) return invalid(label(t), " is ", shape_text(x), ", needs ", shape_text(needed));
  bool contiguous = true;
  bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  for (size_t i = 0; i < shape.size(); ++i) {
    contiguous = contiguous && (x.stride[i] == needed.stride[i] || x.shape[i] == 1 || empty);
  }
  if (contiguous) return {};
  return invalid(label(t), " of ", shape_text(x), " has strides ", strides_text(x),
                 ", needs to be contiguous: ", strides_text(needed));
}

Result<Matrix> check_activations(const Named& t, int64_t features, Use use) {
  BS_RETURN_IF_ERROR(check_tensor(t));
  const ConstTensor& x = t.tensor;
  const auto last = static_cast<size_t>(x.rank) - 1;
  if (x.shape[last] != features) return invalid(label(t), " is ", shape_text(x), ", layout needs [N, ", features, "]");

  Matrix m{.n = 1, .features = features, .token_stride = 1, .feature_stride = x.stride[last]};
  bool one_stride = true;
  bool stride_known = false;
  for (size_t i = last; i-- > 0;) {
    if (x.shape[i] == 1) continue;
    if (!stride_known) m.token_stride = x.stride[i];
    else one_stride = one_stride && x.stride[i] == m.n * m.token_stride;
    stride_known = true;
    m.n *= x.shape[i];
  }
  if (m.n == 0 || features == 0) return Matrix{m.n, features, std::max<int64_t>(features, 1), 1};
  if (!one_stride) {
    return invalid(label(t), " of ", shape_text(x), " has strides ", strides_text(x),
                   ", needs leading dimensions that flatten to one");
  }
  if (features == 1) m.feature_stride = 1;
  if (m.n == 1) m.token_stride = m.feature_stride == 1 ? features : 1;
  if (m.feature_stride != 1 && m.token_stride != 1) {
    return invalid(label(t), " of ", shape_text(x), " has strides ", strides_text(x),
                   ", needs contiguous features or contiguous tokens");
  }
  const bool distinct = m.feature_stride == 1 ? m.n == 1 || m.token_stride >= features : m.feature_stride >= m.n;
  if (use == Use::write && !distinct) {
    return invalid(label(t), " of ", shape_text(x), " has strides ", strides_text(x), ", its elements overlap");
  }
  return m;
}

bool overlap(const void* a, const Matrix& ma, int64_t a_size, const void* b, const Matrix& mb, int64_t b_size) {
  auto [a_begin, a_end] = extent(a, ma, a_size);
  auto [b_begin, b_end] = extent(b, mb, b_size);
  if (a_end <= b_begin || b_end <= a_begin) return false;
  // Columns of one buffer, for example: rows that lie side by side and never meet.
  const bool b_first = b_begin < a_begin;
  const auto shift = static_cast<int64_t>(b_first ? a_begin - b_begin : b_begin - a_begin);
  auto apart = [&](int64_t a_period, int64_t b_period, int64_t a_width, int64_t b_width) {
    if (a_period != b_period || a_period <= 0) return false;
    if (b_first) std::swap(a_width, b_width);
    return rows_interleave(shift, a_period, a_width, b_width);
  };
  if (ma.feature_stride == 1 && mb.feature_stride == 1) {
    return !apart(ma.token_stride * a_size, mb.token_stride * b_size, ma.features * a_size, mb.features * b_size);
  }
  if (ma.token_stride == 1 && mb.token_stride == 1) {
    return !apart(ma.feature_stride * a_size, mb.feature_stride * b_size, ma.n * a_size, mb.n * b_size);
  }
  return true;
}

Matrix one_row(int64_t elements) { return {1, elements, elements, 1}; }

Region region_of(const char* name, const ConstTensor& contiguous) {
  int64_t elements = contiguous.rank > 0 ? 1 : 0;
  for (int i = 0; i < contiguous.rank; ++i) elements *= contiguous.shape[static_cast<size_t>(i)];
  return {name, contiguous.data, one_row(elements), size_of(contiguous.dtype)};
}

Status check_disjoint(const char* op, const Region& out, std::span<const Region> inputs) {
  for (const Region& in : inputs) {
    if (out.data != nullptr && in.data != nullptr &&
        overlap(out.data, out.matrix, out.size, in.data, in.matrix, in.size)) {
      return invalid("[", op, "] ", out.name, " overlaps ", in.name, ", needs memory of its own");
    }
  }
  return {};
}

Status check_address(const char* op, const char* name, const void* data, size_t alignment) {
  const uintptr_t beyond = reinterpret_cast<uintptr_t>(data) % alignment;
  if (beyond == 0) return {};
  return invalid("[", op, "] ", name, "'s address is ", beyond, " beyond a multiple of ", alignment,
                 ", needs a multiple of ", alignment);
}

Status check_workspace(const char* op, const Workspace& workspace, size_t needed, Device device) {
  constexpr size_t kAlignment = 64;
  if (needed > 0 && device.type == DeviceType::cuda) {
    BS_RETURN_IF_ERROR(check_address(op, "workspace", workspace.data, kAlignment));
  }
  if (needed == 0 || (workspace.data != nullptr && workspace.bytes >= needed)) return {};
  return invalid("[", op, "] workspace has ", workspace.data == nullptr ? 0 : workspace.bytes, " bytes, needs ",
                 needed);
}

Status check_stream(const char* op, const Stream& stream) {
  if (stream.math < Math::ieee || stream.math > Math::tf32) {
    return invalid("[", op, "] math is ", static_cast<int32_t>(stream.math), ", needs 0 (ieee) or 1 (tf32)");
  }
  if (stream.threads < 0) return invalid("[", op, "] threads is ", stream.threads, ", needs 0 or more");
  return {};
}

}  // namespace blocksparse

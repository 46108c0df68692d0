// Checks at the edge of an op. Each answers with a sentence that names the op, what it got and what it needs.
#pragma once

#include <span>
#include <string>

#include "blocksparse/layout.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

// "[64, 1024]"
std::string shape_text(const ConstTensor& tensor);
std::string strides_text(const ConstTensor& tensor);

// A tensor of `op` called `name`, as messages show it.
struct Named {
  const char* op;
  const char* name;
  const ConstTensor& tensor;
};

// Checks rank, address, alignment and signs. A null pointer is right only for a tensor without elements.
Status check_tensor(const Named& t);
Status check_dtype(const Named& t, DType needed);
// Checks the dtype of a weight gradient, if it is given: the dtype of the operands or that of their sums.
Status check_gradient_dtype(const Named& t, DType dtype);
Status check_device(const Named& t, Device needed);
// Checks a tensor's device type. C callers may give any number.
Status check_device_type(const char* op, Device device);
// Checks that the tensor is contiguous, row-major and exactly of this shape.
Status check_contiguous(const Named& t, std::initializer_list<int64_t> shape);

// A matrix: a tensor whose leading dimensions were made one.
struct Matrix {
  int64_t n = 0, features = 0;
  int64_t token_stride = 0, feature_stride = 0;
};

// Sees [..., features] as a matrix with one of its strides 1.
enum class Use { read, write };
Result<Matrix> check_activations(const Named& t, int64_t features, Use use);

// Whether two matrices of `size` bytes an element share memory.
bool overlap(const void* a, const Matrix& ma, int64_t a_size, const void* b, const Matrix& mb, int64_t b_size);

// A tensor that was checked, for overlap tests.
struct Region {
  const char* name;
  const void* data;
  Matrix matrix;
  int64_t size;  // of an element
};
Matrix one_row(int64_t elements);
Region region_of(const char* name, const ConstTensor& contiguous);
Status check_disjoint(const char* op, const Region& out, std::span<const Region> inputs);

Status check_address(const char* op, const char* name, const void* data, size_t alignment);
Status check_workspace(const char* op, const Workspace& workspace, size_t needed, Device device);
Status check_stream(const char* op, const Stream& stream);

// Whether a workspace can be asked for: the layout has tables and they lie on `device`.
inline bool has_tables_on(const LayoutView& layout, Device device) {
  return layout.index != nullptr && layout.device == device && is_block_size(layout.block_size);
}

}  // namespace blocksparse

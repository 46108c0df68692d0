// The contiguous tensors of one call on one device.
#pragma once

#include <array>

#include "core/checks.h"
#include "core/text.h"

namespace blocksparse {

// The tensors of one call. Each is checked as it is added; then written tensors are checked for overlap with all
// others. At most `Most` tensors are read and at most `Most` are written.
template <size_t Most>
struct CheckedTensors {
  const char* op;
  Device device;
  std::array<Region, Most> read = {}, written = {};
  size_t reads = 0, writes = 0;

  static Status given(const Named& t) {
    return t.tensor.given() ? Status() : invalid("[", t.op, "] ", t.name, " is not given");
  }
  Status check(const Named& t, DType needed, std::initializer_list<int64_t> shape) const {
    BS_RETURN_IF_ERROR(check_contiguous(t, shape));
    BS_RETURN_IF_ERROR(check_dtype(t, needed));
    return check_device(t, device);
  }
  Status input(const Named& t, DType needed, std::initializer_list<int64_t> shape) {
    if (t.tensor.given()) BS_RETURN_IF_ERROR(check(t, needed, shape));
    read[reads++] = region_of(t.name, t.tensor);
    return {};
  }
  Status needed_input(const Named& t, DType needed, std::initializer_list<int64_t> shape) {
    BS_RETURN_IF_ERROR(given(t));
    return input(t, needed, shape);
  }
  Status output(const Named& t, DType needed, std::initializer_list<int64_t> shape) {
    if (t.tensor.given()) BS_RETURN_IF_ERROR(check(t, needed, shape));
    written[writes++] = region_of(t.name, t.tensor);
    return {};
  }
  Status needed_output(const Named& t, DType needed, std::initializer_list<int64_t> shape) {
    BS_RETURN_IF_ERROR(given(t));
    return output(t, needed, shape);
  }
  Status disjoint() const {
    for (size_t i = 0; i < writes; ++i) {
      BS_RETURN_IF_ERROR(check_disjoint(op, written[i], std::span(read).first(reads)));
      BS_RETURN_IF_ERROR(check_disjoint(op, written[i], std::span(written).subspan(i + 1, writes - i - 1)));
    }
    return {};
  }
};

}  // namespace blocksparse

// The gradient of a bias, of a linear layer or a convolution: sums over its tokens. On a card it takes the time of
// reading dy.
#pragma once

#include <cstddef>

#include "blocksparse/export.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

// dbias[f] = sum of dy[t, f] over all tokens t, in f32 (f64 for f64), rounded once. Two runs give the same bits.
//   dy     [n, features], features-last; leading dimensions flatten to tokens, as in ops.h. The pixels of channels-last
//          images are tokens.
//   dbias  [features], contiguous, dtype of dy; overwritten, overlaps no input
// Nothing is allocated; errors, workspace and streams are as in ops.h.
[[nodiscard]] BS_EXPORT Status bias_gradient(ConstTensor dy, Tensor dbias, Workspace workspace, Stream stream = {});

// Bytes of workspace for a dy of this shape, dtype and device, whose data is not read.
BS_EXPORT size_t bias_gradient_workspace_size(const ConstTensor& dy);

}  // namespace blocksparse

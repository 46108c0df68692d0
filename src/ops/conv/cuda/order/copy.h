// Images with their channels in another order, copied; and sums of dW in f32 on their way from and to 16 bits.
#pragma once

#include "ops/conv/cuda/driver.h"
#include "ops/conv/cuda/order/plan.h"

namespace blocksparse::conv {

// Channels-last, 16 bits, whole vectors of 16 bytes, at most kMostOrderedChannels.
struct ChannelCopy {
  Images from, to;
  const int32_t* order;
  // Channel c of `to` is order[c] of `from`; or, inverse, channel order[c] of `to` is c of `from`, and what no entry
  // names is 0. An entry that is no channel brings 0, or goes nowhere; of two that are the same the last one counts.
  bool inverse;
};
Status copy_channels(const ChannelCopy& copy, const CudaCall& call);

// dw is of 16 bits. What was in it, to the sums; and back.
Status widen_sums(const void* dw, DType dtype, int64_t count, float* sums, const CudaCall& call);
Status narrow_sums(const float* sums, int64_t count, void* dw, DType dtype, const CudaCall& call);

Status prepare_order();

}  // namespace blocksparse::conv

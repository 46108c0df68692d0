// Copies images with their channels in another order, and converts sums of dW between f32 and 16 bits.
#pragma once

#include "ops/conv/cuda/driver.h"
#include "ops/conv/cuda/order/plan.h"

namespace blocksparse::conv {

// Images are channels-last and 16 bits, with whole vectors of 16 bytes and at most kMostOrderedChannels channels.
struct ChannelCopy {
  Images from, to;
  const int32_t* order;
  // Channel c of `to` is order[c] of `from`. Inverse: channel order[c] of `to` is c of `from`, and a channel that no
  // entry names is 0. An entry that is no channel brings 0, or goes nowhere. Of equal entries the last one counts.
  bool inverse;
};
Status copy_channels(const ChannelCopy& copy, const CudaCall& call);

// dw has 16 bits. widen_sums() copies it to the sums, narrow_sums() copies the sums back.
Status widen_sums(const void* dw, DType dtype, int64_t count, float* sums, const CudaCall& call);
Status narrow_sums(const float* sums, int64_t count, void* dw, DType dtype, const CudaCall& call);

Status prepare_order();

}  // namespace blocksparse::conv

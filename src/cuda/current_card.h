// The card that is current, for preparing kernels on it.
#pragma once

#include "cuda/card.h"
#include "cuda/error.h"

namespace blocksparse::cuda {

inline Result<Card> current_card() {
  int index = 0;
  BS_RETURN_IF_ERROR(status_of(cudaGetDevice(&index), "cudaGetDevice"));
  return card_of({DeviceType::cuda, index});
}

}  // namespace blocksparse::cuda

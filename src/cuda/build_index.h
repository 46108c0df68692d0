// Tables of layouts made on a card: make_device_index() of device_index.h.
#pragma once

#include "blocksparse/status.h"

namespace blocksparse::cuda {

Status prepare_build_index();  // on the current device

}  // namespace blocksparse::cuda

// Builds the tables of a layout on a card: see make_device_index() in blocksparse/device_index.h.
#pragma once

#include "blocksparse/status.h"

namespace blocksparse::cuda {

Status prepare_build_index();  // on the current device

}  // namespace blocksparse::cuda

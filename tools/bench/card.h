// Timing and ceilings of a CUDA card; in builds without CUDA the answer `unavailable`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "blocksparse/status.h"
#include "opponents.h"
#include "options.h"
#include "timing.h"

namespace blocksparse::bench {

// The stream on which everything that is timed is queued; null where there is no card.
void* card_stream();

std::string card_name();   // "NVIDIA H200"
std::string card_facts();  // the rest of what results depend on, as members of a JSON object: driver, CUDA, size

// Copies of device memory, for weights that are rotated past the L2 cache.
Result<std::shared_ptr<void>> copies_on_card(const void* from, size_t bytes, int copies);

// As time_all, by events around replays of graphs that hold many launches, or around as many launches where a library
// cannot be captured.
Result<Timings> time_on_card(const std::vector<Contender>& contenders, const Options& options);

// us of one run of `body` queued on the stream: the median of some.
Result<double> time_once_on_card(const std::function<void()>& body);

// Bytes/s read from memory far larger than the L2 cache; measured once.
Result<double> card_bandwidth();

}  // namespace blocksparse::bench

// Timing and ceilings of a CUDA card. Builds without CUDA return `unavailable`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "blocksparse/status.h"
#include "opponents.h"
#include "options.h"
#include "timing.h"

namespace blocksparse::bench {

// The stream of everything that is timed; null without a card.
void* card_stream();

std::string card_name();   // "NVIDIA H200"
std::string card_facts();  // other facts that matter for results, as members of a JSON object: driver, CUDA, size

// Copies of device memory, for weights that are rotated past the L2 cache.
Result<std::shared_ptr<void>> copies_on_card(const void* from, size_t bytes, int copies);

// Does what time_all does, by events around replays of graphs with many launches. If a library cannot be captured, the
// events are around as many launches.
Result<Timings> time_on_card(const std::vector<Contender>& contenders, const Options& options);

// us of one run of `body`, which queues on the stream: the median of some runs.
Result<double> time_once_on_card(const std::function<void()>& body);

// Bytes/s read from memory far larger than the L2 cache; measured once.
Result<double> card_bandwidth();

}  // namespace blocksparse::bench

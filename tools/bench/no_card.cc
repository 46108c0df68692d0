// The card's functions in a build without CUDA.
#include "blocksparse/blocksparse.h"
#include "card.h"

namespace blocksparse::bench {

void* card_stream() { return nullptr; }
std::string card_name() { return ""; }
std::string card_facts() { return ""; }
Result<std::shared_ptr<void>> copies_on_card(const void*, size_t, int) { return cuda_status(); }
Result<Timings> time_on_card(const std::vector<Contender>&, const Options&) { return cuda_status(); }
Result<double> time_once_on_card(const std::function<void()>&) { return cuda_status(); }
Result<double> card_bandwidth() { return cuda_status(); }

}  // namespace blocksparse::bench

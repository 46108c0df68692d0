#include "cpu/pages.h"

#include <cstdint>

#include "core/ceil_div.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace blocksparse {

void advise_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = round_up(address, kPage), last = (address + bytes) / kPage * kPage;
  if (bytes >= 2 * kPage && last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace blocksparse

// Pages of memory that a caller has given.
#pragma once

#include <cstddef>

namespace blocksparse {

// Asks for large pages in memory of 4 MB and more. Otherwise the first touch of every 4 KB of new memory costs up to 2
// us (a virtual machine). It is a hint: no result depends on it.
void advise_large_pages(void* data, size_t bytes);

}  // namespace blocksparse

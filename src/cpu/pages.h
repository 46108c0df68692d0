// Pages of memory that a caller has given.
#pragma once

#include <cstddef>

namespace blocksparse {

// Asks for large pages in memory of 4 MB and more, for where memory is new the first touch of every 4 KB costs up to 2
// us (a virtual machine). A hint: nothing depends on it.
void advise_large_pages(void* data, size_t bytes);

}  // namespace blocksparse

#include "core/text.h"

#include <cstdio>

namespace blocksparse::text_detail {

std::string piece(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.4g", value);
  return buffer;
}

}  // namespace blocksparse::text_detail

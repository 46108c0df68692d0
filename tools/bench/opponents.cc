#include "opponents.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/index.h"
#include "core/text.h"

namespace blocksparse::bench {

const std::vector<Opponent>& opponents() {
  static const std::vector<Opponent> list = {
      {"openblas", true, prepare_openblas},
  };
  return list;
}

void* open_library(const char* variable, std::initializer_list<const char*> names) {
  if (const char* path = std::getenv(variable); path != nullptr && *path != '\0') return dlopen(path, RTLD_NOW);
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW)) return library;
  }
  return nullptr;
}

namespace {

// Calls body(offset in the dense matrix, offset in the values, elements) for each row of each block.
template <class Body>
void for_each_block_row(const linear::LinearData& data, Body&& body) {
  LayoutView view = data.layout().view();
  const auto refs = walk_of(view, false).refs;
  const auto rows = out_of(view);
  const int64_t b = view.block_size;
  for (int64_t i = 0; i < view.blocks; ++i) {
    const int64_t out = rows[static_cast<size_t>(i)] * b, in = refs[static_cast<size_t>(i)].from * b;
    const int64_t width = std::min(b, view.in_features - in);
    for (int64_t o = 0; o < std::min(b, view.out_features - out); ++o) {
      body((out + o) * view.in_features + in, (i * b + o) * b, width);
    }
  }
}

}  // namespace

linear::Bytes dense_weights(const linear::LinearData& data) {
  const LayoutView view = data.layout().view();
  const Tensor& w = data.weights();
  const int64_t size = size_of(w.dtype);
  linear::Bytes dense(static_cast<size_t>(view.out_features * view.in_features * size), 0);
  for_each_block_row(data, [&](int64_t to, int64_t from, int64_t count) {
    std::memcpy(dense.data() + to * size, static_cast<const char*>(w.data) + from * size,
                static_cast<size_t>(count * size));
  });
  return dense;
}

void store_blocks(const void* dense_dw, linear::LinearData& data) {
  const Tensor& dw = data.output();
  const int64_t size = size_of(dw.dtype);
  for_each_block_row(data, [&](int64_t from, int64_t to, int64_t count) {
    std::memcpy(static_cast<char*>(dw.data) + to * size, static_cast<const char*>(dense_dw) + from * size,
                static_cast<size_t>(count * size));
  });
}

int copies_for(size_t bytes, size_t rotate_bytes) {
  return static_cast<int>(std::clamp<size_t>((rotate_bytes + bytes - 1) / std::max<size_t>(bytes, 1), 1, 4096));
}

Status check_output(const std::string& name, linear::LinearData& data) {
  const auto error = data.compare();
  if (error.worst <= 1) return {};
  return {StatusCode::unsupported, concat(name, " gives a wrong result: ", error.where)};
}

}  // namespace blocksparse::bench

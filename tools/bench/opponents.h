// Libraries to be measured beside us, found at run time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "blocksparse/status.h"
#include "ops/linear/problem.h"

namespace blocksparse::bench {

// One library, ready to do the problem. run(i) does it with the i-th copy of its weights, where it made several.
struct Contender {
  std::string name;  // "openblas 0.3.30", say
  std::function<void(int copy)> run;
  int copies = 1;
};

struct Opponent {
  std::string name;    // as in --vs
  bool dense = false;  // belongs to --vs dense
  // Why it cannot be found on this machine or do this problem, or a contender. Its result is checked before it is given.
  Result<Contender> (*prepare)(linear::LinearData& data, size_t rotate_bytes);
};

const std::vector<Opponent>& opponents();

// The dense W [out_features, in_features] of a problem, row-major, in its dtype, zeros where there is no block.
linear::Bytes dense_weights(const linear::LinearData& data);

// Copies the blocks of a dense dW [out_features, in_features] into the problem's output, so that it can be compared.
void store_blocks(const void* dense_dw, linear::LinearData& data);

// Copies of something of `bytes` bytes that together exceed `rotate_bytes`: 1 to 4096.
int copies_for(size_t bytes, size_t rotate_bytes);

// Ok if the problem's output, which a contender has just made, is right.
Status check_output(const std::string& name, linear::LinearData& data);

// Opens the first of these shared libraries that is there; null otherwise. `variable` in the environment names another.
void* open_library(const char* variable, std::initializer_list<const char*> names);

Result<Contender> prepare_openblas(linear::LinearData& data, size_t rotate_bytes);

}  // namespace blocksparse::bench

// Files of problems.
#pragma once

#include <string>
#include <vector>

#include "blocksparse/status.h"

namespace blocksparse::bench {

// Adds the problems of a file, one a line, or of all *.txt in a folder. # begins a comment. {a,b} stands for each of
// its words in turn, as in a shell: "linear:{fprop,dgrad} f32 n=64 b=8 random(128,{0.1,0.5})" is four problems.
Status read_problems(const std::string& path, std::vector<std::string>& problems);

}  // namespace blocksparse::bench

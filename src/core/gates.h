// The gates of an LSTM's cell.
#pragma once

namespace blocksparse {

inline constexpr int kGates = 4;  // i, f, g, o, the order of torch.nn.LSTM

}  // namespace blocksparse

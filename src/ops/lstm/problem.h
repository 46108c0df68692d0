// An LSTM problem, given by a line of text, for tests. It makes the data, runs the op on the instruction set in use and
// compares with the reference in f64.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/layout.h"
#include "blocksparse/lstm.h"

namespace blocksparse::lstm {

// lstm:<forward|backward> <dtype> <graph> and any of
//   t=5 n=7 b=16 seed=0 threads=1     steps, sequences, block size, seed of graph and data, threads
//   h0 c0 lengths                     an initial state, lengths at random (0 and all steps among them)
//   sorted                            lengths, the longest first
//   keep final                        forward: also makes gates and cells; h and c. backward: dh and dc
//   dh0 dc0 dw accumulate wide        backward: what is made; add to dW; dW in f32
//   device=cuda odd                   runs on the first card; there, all tensors but w begin at odd elements
// The graph is that of one gate's [H, H], which all four gates share; or it has four times as many rows as columns.
struct LstmCase {
  bool backward = false;
  DType dtype = DType::f32;
  std::string graph;
  int64_t t = 5, n = 7, block = 16, seed = 0, threads = 1;
  bool h0 = false, c0 = false, lengths = false, sorted = false, keep = false, final = false;
  bool dh0 = false, dc0 = false, dw = false, accumulate = false, wide = false, odd = false;
  Device device;
};

Result<LstmCase> parse_lstm_case(std::string_view line);
std::string to_string(const LstmCase& c);

class LstmData {
 public:
  static Result<LstmData> make(const LstmCase& c);

  // Poisons the outputs and runs the op through its public function.
  Status run();
  // The parts of run() on a card: the poison goes there, and the result of a stream's work comes back.
  Status upload();
  Status launch(void* stream);
  Status download();
  // Makes other inputs, for forward cases alone: backward has inputs that the first ones made.
  Status refill(uint64_t seed);
  // The largest |out - expected| / bound over all outputs, and where it is. Results are right if it is at most 1.
  struct Error {
    double worst = 0;
    std::string where;
  };
  Error compare();
  // The name of an output around which something was written, or "".
  std::string overrun() const;
  // The bits of all outputs.
  std::vector<char> bits() const;
  const Layout& layout() const { return layout_; }
  bool is_forward() const { return !case_.backward; }
  bool adds() const { return case_.accumulate; }

 private:
  struct Buffer {
    std::vector<char> bytes;  // with poison before and behind
    DType dtype = DType::f32;
    std::vector<int64_t> shape;
    int64_t elements = 0;
    bool output = false, summed = false;  // made by a sum over all tokens: dW
    std::shared_ptr<void> device;         // all bytes on a card, if the case runs there
    int64_t shift = 0;                    // of the data there, in bytes
    Tensor tensor();
    char* data() { return bytes.data() + kGuard; }
  };
  using Buffers = std::map<std::string, Buffer>;
  static constexpr int64_t kGuard = 64;

  LstmData(const LstmCase& c, Layout layout) : case_(c), layout_(std::move(layout)) {}
  Buffer& add(const char* name, bool wanted, DType dtype, std::vector<int64_t> shape, bool output);
  void make_data();
  Buffers make_wide() const;
  Status move_to_device();
  size_t workspace_size() const;
  void poison();
  Status copy(bool to_device);
  Status call(Buffers& buffers, const LayoutView& layout, const int64_t* lengths, Workspace workspace,
              void* stream) const;
  double bound(const Buffer& got, double largest) const;

  LstmCase case_;
  Layout layout_;
  Buffers buffers_;
  std::optional<Buffers> expected_;
  std::vector<int64_t> lengths_;
  std::vector<char> workspace_;
  LayoutView view_;  // where the case runs
  std::shared_ptr<void> device_index_, device_lengths_, device_workspace_;
};

}  // namespace blocksparse::lstm

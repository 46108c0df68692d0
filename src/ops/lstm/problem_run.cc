// Runs an LSTM case where its data lies, and looks for writes outside of the outputs.
#include <algorithm>

#include "blocksparse/device_index.h"
#include "core/convert.h"
#include "core/random.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "gemm/problem_data.h"
#include "ops/lstm/problem.h"

namespace blocksparse::lstm {

using gemm::kPoison;

Status LstmData::call(Buffers& at, const LayoutView& layout, const int64_t* lengths, Workspace workspace,
                      void* handle) const {
  const LstmCase& c = case_;
  const Stream stream{handle, static_cast<int32_t>(c.threads)};
  auto t = [&](const char* name) { return at[name].tensor(); };
  if (!c.backward) {
    return lstm_forward(layout, {t("pre"), t("w"), t("h0"), t("c0"), lengths},
                        {t("y"), t("h"), t("c"), t("gates"), t("cells")}, workspace, stream);
  }
  return lstm_backward(layout, {t("w"), t("h0"), t("c0"), lengths, t("y"), t("gates"), t("cells")},
                       {t("dy"), t("dh"), t("dc")}, c.accumulate ? Accumulate::yes : Accumulate::no,
                       {t("dpre"), t("dw"), t("dh0"), t("dc0")}, workspace, stream);
}

Status LstmData::move_to_device() {
  const Device device = case_.device;
  const auto place = [&](const void* from, size_t bytes, int64_t shift, std::shared_ptr<void>& to) -> Status {
    auto memory = cuda::allocate(device, bytes + static_cast<size_t>(shift));
    if (!memory.ok()) return memory.status();
    to = *std::move(memory);
    return cuda::copy_to_device(device, static_cast<char*>(to.get()) + shift, from, bytes);
  };
  const std::vector<int32_t> index = index_for_card(layout_);
  BS_RETURN_IF_ERROR(place(index.data(), index.size() * sizeof(int32_t), 0, device_index_));
  BS_RETURN_IF_ERROR(place(lengths_.data(), lengths_.size() * sizeof(int64_t), 0, device_lengths_));
  const LayoutView::Sizes sizes{.block_size = view_.block_size,
                                .out_features = view_.out_features,
                                .in_features = view_.in_features,
                                .blocks = view_.blocks};
  const auto on_device =
      LayoutView::on_device({static_cast<const int32_t*>(device_index_.get()), index.size()}, sizes, device);
  if (!on_device.ok()) return on_device.status();
  view_ = *on_device;
  for (auto& [name, b] : buffers_) {
    b.shift = case_.odd && name != "w" ? size_of(b.dtype) : 0;
    if (!b.bytes.empty()) BS_RETURN_IF_ERROR(place(b.bytes.data(), b.bytes.size(), b.shift, b.device));
  }
  workspace_.assign(workspace_size() + static_cast<size_t>(kGuard), kPoison);
  return place(workspace_.data(), workspace_.size(), 0, device_workspace_);
}

size_t LstmData::workspace_size() const {
  const auto size = case_.backward ? lstm_backward_workspace_size : lstm_forward_workspace_size;
  return size({view_, case_.dtype, case_.t, case_.n}, case_.device);
}

void LstmData::poison() {
  for (auto& [name, b] : buffers_) {
    if (!b.output) continue;
    std::fill(b.bytes.begin(), b.bytes.end(), kPoison);
    for (int64_t i = 0; b.summed && case_.accumulate && i < b.elements; ++i) {
      store_element(b.data(), i, b.dtype, 0.5 * static_cast<double>(i % 3));
    }
  }
  workspace_.assign(workspace_size() + static_cast<size_t>(kGuard), kPoison);
}

Status LstmData::copy(bool to_device) {
  if (device_workspace_ == nullptr) return {};
  const auto both_ways = [&](std::vector<char>& here, const std::shared_ptr<void>& there, int64_t shift) {
    char* at = static_cast<char*>(there.get()) + shift;
    return to_device ? cuda::copy_to_device(case_.device, at, here.data(), here.size())
                     : cuda::copy_to_host(case_.device, here.data(), at, here.size());
  };
  for (auto& [name, b] : buffers_) {
    if (b.output && !b.bytes.empty()) BS_RETURN_IF_ERROR(both_ways(b.bytes, b.device, b.shift));
  }
  return both_ways(workspace_, device_workspace_, 0);
}

Status LstmData::upload() {
  poison();
  return copy(true);
}

Status LstmData::launch(void* stream) {
  const bool on_card = device_workspace_ != nullptr;
  void* memory = on_card ? device_workspace_.get() : workspace_.data();
  const void* lengths = on_card ? device_lengths_.get() : lengths_.data();
  return call(buffers_, view_, lengths_.empty() ? nullptr : static_cast<const int64_t*>(lengths),
              {memory, workspace_.size() - static_cast<size_t>(kGuard)}, stream);
}

Status LstmData::download() { return copy(false); }

Status LstmData::run() {
  BS_RETURN_IF_ERROR(upload());
  BS_RETURN_IF_ERROR(launch(nullptr));
  return download();
}

Status LstmData::refill(uint64_t seed) {
  Random rng(seed);
  expected_.reset();
  for (const char* name : {"h0", "c0", "pre"}) {
    Buffer& b = buffers_.at(name);
    for (int64_t i = 0; i < b.elements; ++i) store_element(b.data(), i, b.dtype, 2 * rng.uniform() - 1);
    if (b.device == nullptr) continue;
    char* at = static_cast<char*>(b.device.get()) + b.shift;
    BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, at, b.bytes.data(), b.bytes.size()));
  }
  return {};
}

std::string LstmData::overrun() const {
  for (const auto& [name, b] : buffers_) {
    if (!b.output || b.bytes.empty()) continue;
    for (size_t i = 0; i < static_cast<size_t>(kGuard); ++i) {
      if (b.bytes[i] != kPoison || b.bytes[b.bytes.size() - 1 - i] != kPoison) return name;
    }
  }
  const bool inside = std::all_of(workspace_.end() - kGuard, workspace_.end(), [](char c) { return c == kPoison; });
  return inside ? "" : "workspace";
}

std::vector<char> LstmData::bits() const {
  std::vector<char> all;
  for (const auto& [name, b] : buffers_) {
    if (b.output) all.insert(all.end(), b.bytes.begin(), b.bytes.end());
  }
  return all;
}

}  // namespace blocksparse::lstm

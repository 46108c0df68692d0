// Runs a convolution where its data lies, and looks for writes outside of the outputs.
#include <algorithm>
#include <utility>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/text.h"
#include "cuda/memory.h"
#include "ops/conv/problem.h"

namespace blocksparse::conv {

using gemm::kGuard;
using gemm::kPoison;

size_t ConvData::workspace_size() const {
  const ConvCase& c = case_;
  const ConvProblem problem{
      .conv = convolution(), .dtype = c.dtype, .n = c.n, .size = c.size, .channels_last = c.channels_last};
  switch (c.pass) {
    case Pass::fprop: return conv_fprop_workspace_size(problem, c.device);
    case Pass::dgrad: return conv_dgrad_workspace_size(problem, c.device);
    case Pass::wgrad: break;
  }
  return conv_wgrad_workspace_size(problem, c.device);
}

Status ConvData::move_to_device() {
  const auto copy = [this](const void* from, size_t bytes, std::shared_ptr<void>& to) -> Status {
    auto memory = cuda::allocate(case_.device, bytes);
    if (!memory.ok()) return memory.status();
    to = *std::move(memory);
    return cuda::copy_to_device(case_.device, to.get(), from, bytes);
  };
  const std::vector<int32_t> index = index_for_card(layout_);
  BS_RETURN_IF_ERROR(copy(index.data(), index.size() * sizeof(int32_t), device_index_));
  BS_RETURN_IF_ERROR(copy(workspace_.data(), workspace_.size(), device_workspace_));
  if (case_.order) BS_RETURN_IF_ERROR(copy(order_.data(), order_.size() * sizeof(int32_t), device_order_));
  const auto on_device = LayoutView::on_device({static_cast<const int32_t*>(device_index_.get()), index.size()},
                                               {.block_size = view_.block_size,
                                                .out_features = view_.out_features,
                                                .in_features = view_.in_features,
                                                .blocks = view_.blocks},
                                               case_.device);
  if (!on_device.ok()) return on_device.status();
  view_ = layout_.transposed() ? on_device->t() : *on_device;
  for (Block* block : {&w_, &gates_, &bias_, &residual_, &x_, &dy_, &y_, &dgates_}) {
    if (block->tensor.given()) BS_RETURN_IF_ERROR(copy(block->bytes.data(), block->bytes.size(), block->device));
  }
  return {};
}

Tensor ConvData::placed(const Block& block) const {
  Tensor tensor = block.tensor;
  if (block.device == nullptr) return tensor;
  tensor.data = static_cast<char*>(block.device.get()) + kGuard;
  tensor.device = case_.device;
  return tensor;
}

Convolution ConvData::convolution() const {
  Convolution conv{.layout = view_, .geometry = case_.geometry};
  if (!case_.order) return conv;
  conv.channel_order = order_;
  if (device_order_ != nullptr) conv.channel_order = {static_cast<const int32_t*>(device_order_.get()), order_.size()};
  return conv;
}

Status ConvData::upload_inputs() {
  for (const Block* b : {&w_, &gates_, &bias_, &residual_, &x_, &dy_}) {
    if (b->device == nullptr) continue;
    BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, b->device.get(), b->bytes.data(), b->bytes.size()));
  }
  if (device_order_ == nullptr) return {};
  return cuda::copy_to_device(case_.device, device_order_.get(), order_.data(), order_.size() * sizeof(int32_t));
}

Status ConvData::change_inputs(uint64_t seed) {
  fill_inputs(seed);
  return upload_inputs();
}

Status ConvData::set_order(std::vector<int32_t> order) {
  order_ = std::move(order);
  expected_.reset();
  return upload_inputs();
}

Status ConvData::silence(int64_t channel) {
  const Block& block = case_.pass == Pass::dgrad ? y_ : x_;
  const int64_t channels = layout_.in_features(), step = block.tensor.stride[1];
  for (int64_t i = 0; i < block.count; ++i) {
    if (i / step % channels == channel) store_element(block.tensor.data, i, block.tensor.dtype, 0);
  }
  expected_.reset();
  return upload_inputs();
}

Status ConvData::upload_outputs() {
  if (device_workspace_ == nullptr) return {};
  BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, device_workspace_.get(), workspace_.data(), workspace_.size()));
  for (Block* b : {&y_, &dgates_}) {
    if (b->device == nullptr) continue;
    BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, b->device.get(), b->bytes.data(), b->bytes.size()));
  }
  return {};
}

Status ConvData::download_outputs() {
  if (device_workspace_ == nullptr) return {};
  BS_RETURN_IF_ERROR(cuda::copy_to_host(case_.device, workspace_.data(), device_workspace_.get(), workspace_.size()));
  for (Block* b : {&y_, &dgates_}) {
    if (b->device == nullptr) continue;
    BS_RETURN_IF_ERROR(cuda::copy_to_host(case_.device, b->bytes.data(), b->device.get(), b->bytes.size()));
  }
  return {};
}

Result<std::string> ConvData::kernel() const {
  if (case_.device.type == DeviceType::cuda) {
    LayoutView plain = view_;
    plain.transposed = false;
    if (case_.pass == Pass::wgrad) {
      WeightGradient g = host_gradient();
      g.layout = plain;
      return cuda_choice(g);
    }
    Product p = host_product();
    p.layout = plain;
    return cuda_choice(p);
  }
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return std::string(name_of(*isa));
}

void ConvData::poison() {
  std::fill(y_.bytes.begin(), y_.bytes.end(), kPoison);
  std::fill(dgates_.bytes.begin(), dgates_.bytes.end(), kPoison);
  std::fill(workspace_.begin(), workspace_.end(), kPoison);
}

Status ConvData::run() {
  poison();
  if (case_.accumulate) {
    std::copy(before_.bytes.begin(), before_.bytes.end(), y_.bytes.begin());
    std::copy(gates_before_.bytes.begin(), gates_before_.bytes.end(), dgates_.bytes.begin());
  }
  BS_RETURN_IF_ERROR(upload_outputs());
  BS_RETURN_IF_ERROR(run_again(placed(w_).data));
  return download_outputs();
}

Status ConvData::run_again(const void* w) {
  const ConvCase& c = case_;
  void* scratch = device_workspace_ == nullptr ? workspace_.data() : device_workspace_.get();
  const Workspace workspace{scratch, workspace_bytes()};
  const Stream stream{
      .handle = stream_, .threads = static_cast<int32_t>(c.threads), .math = c.tf32 ? Math::tf32 : Math::ieee};
  ConstTensor values = placed(w_);
  values.data = w;
  const Weights weights(values, placed(gates_));
  const Convolution conv = convolution();
  switch (c.pass) {
    case Pass::fprop:
      return conv_fprop(conv, placed(x_), weights, {placed(bias_), placed(residual_), c.activation}, placed(y_),
                        workspace, stream);
    case Pass::dgrad: return conv_dgrad(conv, placed(dy_), weights, placed(y_), workspace, stream);
    case Pass::wgrad: break;
  }
  return conv_wgrad(conv, placed(x_), placed(dy_), c.dgates || c.gates ? weights : Weights(),
                    c.accumulate ? Accumulate::yes : Accumulate::no, {placed(y_), placed(dgates_)}, workspace, stream);
}

std::string ConvData::overrun() const {
  const auto beside = [](const Block& block) {
    const auto poisoned = [](char c) { return c == kPoison; };
    return !std::all_of(block.bytes.begin(), block.bytes.begin() + kGuard, poisoned) ||
           !std::all_of(block.bytes.end() - kGuard, block.bytes.end(), poisoned);
  };
  if (!std::all_of(workspace_.end() - kGuard, workspace_.end(), [](char c) { return c == kPoison; })) {
    return "workspace: beyond its end";
  }
  if (beside(y_)) return "output: beside it";
  return dgates_.tensor.given() && beside(dgates_) ? "dgates: beside them" : "";
}

}  // namespace blocksparse::conv

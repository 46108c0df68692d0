// Runs a linear problem where its data lies, and looks for writes outside of the outputs.
#include <algorithm>
#include <vector>

#include "blocksparse/device_index.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "cuda/memory.h"
#include "gemm/cpu/plan.h"
#include "ops/linear/problem.h"

namespace blocksparse::linear {

size_t LinearData::workspace_size() const {
  const LinearCase& c = case_;
  LinearProblem problem{.layout = view_, .dtype = c.dtype, .n = c.n};
  switch (c.pass) {
    case Pass::fprop:
      return c.hidden > 0 ? linear_glu_fprop_workspace_size(problem, c.device)
                          : linear_fprop_workspace_size(problem, c.device);
    case Pass::dgrad: return linear_dgrad_workspace_size(problem, c.device);
    case Pass::wgrad: break;
  }
  problem.n *= std::max<int64_t>(1, c.pairs);
  return linear_wgrad_workspace_size(problem, c.device);
}

Status LinearData::move_to_device() {
  const auto copy = [this](const void* from, size_t bytes, std::shared_ptr<void>& to) -> Status {
    auto memory = cuda::allocate(case_.device, bytes);
    if (!memory.ok()) return memory.status();
    to = *std::move(memory);
    return cuda::copy_to_device(case_.device, to.get(), from, bytes);
  };
  const std::vector<int32_t> index = index_for_card(layout_);
  BS_RETURN_IF_ERROR(copy(index.data(), index.size() * sizeof(int32_t), device_index_));
  BS_RETURN_IF_ERROR(copy(workspace_.data(), workspace_.size(), device_workspace_));
  const auto on_device = LayoutView::on_device({static_cast<const int32_t*>(device_index_.get()), index.size()},
                                               {.block_size = view_.block_size,
                                                .out_features = view_.out_features,
                                                .in_features = view_.in_features,
                                                .blocks = view_.blocks},
                                               case_.device);
  if (!on_device.ok()) return on_device.status();
  view_ = layout_.transposed() ? on_device->t() : *on_device;
  std::vector<Buffer*> buffers = {&w_, &gates_, &bias_, &residual_, &y_, &dgates_};
  for (Buffer& x : x_) buffers.push_back(&x);
  for (Buffer& dy : dy_) buffers.push_back(&dy);
  for (Buffer* b : buffers) {
    if (b->tensor.given()) BS_RETURN_IF_ERROR(copy(b->bytes.data(), b->bytes.size(), b->device));
  }
  return {};
}

Tensor LinearData::placed(const Buffer& buffer) const {
  Tensor tensor = buffer.tensor;
  if (buffer.device == nullptr) return tensor;
  tensor.data = static_cast<char*>(buffer.device.get()) + (static_cast<char*>(tensor.data) - buffer.bytes.data());
  tensor.device = case_.device;
  return tensor;
}

Tensor LinearData::placed(const Tensor& tensor) const {
  std::vector<const Buffer*> buffers = {&w_, &y_, &dgates_};
  for (const Buffer& x : x_) buffers.push_back(&x);
  for (const Buffer& dy : dy_) buffers.push_back(&dy);
  for (const Buffer* b : buffers) {
    if (b->tensor.given() && b->tensor.data == tensor.data) return placed(*b);
  }
  return tensor;
}

Status LinearData::upload_outputs() {
  if (device_workspace_ == nullptr) return {};
  BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, device_workspace_.get(), workspace_.data(), workspace_.size()));
  for (Buffer* b : {&y_, &dgates_}) {
    if (b->device == nullptr) continue;
    BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, b->device.get(), b->bytes.data(), b->bytes.size()));
  }
  return {};
}

Status LinearData::download_outputs() {
  if (device_workspace_ == nullptr) return {};
  BS_RETURN_IF_ERROR(cuda::copy_to_host(case_.device, workspace_.data(), device_workspace_.get(), workspace_.size()));
  for (Buffer* b : {&y_, &dgates_}) {
    if (b->device == nullptr) continue;
    BS_RETURN_IF_ERROR(cuda::copy_to_host(case_.device, b->bytes.data(), b->device.get(), b->bytes.size()));
  }
  return {};
}

void LinearData::poison() {
  std::fill(y_.bytes.begin(), y_.bytes.end(), kPoison);
  std::fill(dgates_.bytes.begin(), dgates_.bytes.end(), kPoison);
  std::fill(workspace_.begin(), workspace_.end(), kPoison);
}

Status LinearData::run() {
  poison();
  if (case_.accumulate) {
    y_.bytes = before_.bytes;
    y_.tensor.data = y_.bytes.data() + kGuard;
    if (case_.dgates) {
      dgates_.bytes = gates_before_.bytes;
      dgates_.tensor.data = dgates_.bytes.data() + kGuard;
    }
  }
  BS_RETURN_IF_ERROR(upload_outputs());
  BS_RETURN_IF_ERROR(run_again(placed(w_).data));
  return download_outputs();
}

namespace {

Math math_of(const LinearCase& c) { return c.tf32 ? Math::tf32 : Math::ieee; }

}  // namespace

Result<std::string> LinearData::kernel() const {
  if (case_.device.type == DeviceType::cuda) {
    LayoutView plain = view_;
    plain.transposed = false;
    if (case_.pass == Pass::wgrad) {
      const std::vector<GradPair> pairs = host_pairs();
      WeightGradient g = host_gradient(pairs);
      g.layout = plain;
      return cuda_choice(g, math_of(case_));
    }
    Product p = host_product();
    p.layout = plain;
    p.glu = p.glu && fuses_glu(view_, case_.dtype, case_.n, case_.device);
    return cuda_choice(p, math_of(case_));
  }
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return std::string(name_of(*isa));
}

std::string LinearData::plan() const {
  const auto isa = current_isa();
  if (case_.device.type == DeviceType::cuda || !isa.ok()) return "";
  const int32_t threads = threads_for(static_cast<int32_t>(case_.threads));
  if (case_.pass != Pass::wgrad) return cpu_choice(host_product(), *isa, threads);
  const std::vector<GradPair> pairs = host_pairs();
  return cpu_choice(host_gradient(pairs), *isa, threads);
}

Status LinearData::run_again(const void* w) {
  void* scratch = device_workspace_ == nullptr ? workspace_.data() : device_workspace_.get();
  const Workspace workspace{scratch, workspace_.size() - static_cast<size_t>(kGuard)};
  const Stream stream{.handle = stream_, .threads = static_cast<int32_t>(case_.threads), .math = math_of(case_)};
  ConstTensor values = placed(w_);
  values.data = w;
  const Weights weights(values, placed(gates_));
  const Tensor y = placed(y_);
  switch (case_.pass) {
    case Pass::fprop:
      if (case_.hidden > 0) {
        return linear_glu_fprop(view_, placed(x_[0]), weights, {placed(bias_), {}, case_.activation}, y, workspace,
                                stream);
      }
      return linear_fprop(view_, placed(x_[0]), weights, {placed(bias_), placed(residual_), case_.activation}, y,
                          workspace, stream);
    case Pass::dgrad: return linear_dgrad(view_, placed(x_[0]), weights, y, workspace, stream);
    case Pass::wgrad: break;
  }
  std::vector<GradPair> pairs;
  for (size_t i = 0; i < x_.size(); ++i) pairs.push_back({placed(x_[i]), placed(dy_[i])});
  return linear_wgrad(view_, pairs, case_.dgates || case_.gates ? weights : Weights(),
                      case_.accumulate ? Accumulate::yes : Accumulate::no, {y, placed(dgates_)}, workspace, stream);
}

std::string LinearData::overrun() const {
  auto find = [](const Buffer& buffer) -> std::string {
    std::vector<bool> written(buffer.bytes.size(), false);
    const int64_t size = size_of(buffer.tensor.dtype);
    const auto base = static_cast<const char*>(buffer.tensor.data) - buffer.bytes.data();
    for_each_element(buffer.tensor, [&](int64_t i) {
      for (int64_t byte = 0; byte < size; ++byte) written[static_cast<size_t>(base + i * size + byte)] = true;
    });
    for (size_t i = 0; i < buffer.bytes.size(); ++i) {
      if (!written[i] && buffer.bytes[i] != kPoison)
        return concat("byte ", static_cast<int64_t>(i) - base, " was written");
    }
    return "";
  };
  const auto guard = workspace_.end() - kGuard;
  if (std::any_of(guard, workspace_.end(), [](char c) { return c != kPoison; })) return "workspace: beyond its end";
  if (std::string found = find(y_); !found.empty()) return "output: " + found;
  if (dgates_.tensor.given()) {
    if (std::string found = find(dgates_); !found.empty()) return "dgates: " + found;
  }
  return "";
}

}  // namespace blocksparse::linear

// blocksparse-bench: times problems, each given by a line of text, beside other libraries and the machine's limits.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "blocksparse/blocksparse.h"
#include "card.h"
#include "choice.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "machine.h"
#include "opponents.h"
#include "options.h"
#include "report.h"
#include "reproduce.h"
#include "timing.h"

namespace blocksparse::bench {

namespace {

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "blocksparse-bench: %s\n", status.message().c_str());
  std::exit(1);
}

template <class T>
T must(Result<T> result) {
  must(result.status());
  return *std::move(result);
}

template <class Data>
Contender ourselves(Data& data, const Options& options) {
  const Tensor& w = data.weights();
  auto bytes = static_cast<size_t>(size_of(w.dtype));
  for (int i = 0; i < w.rank; ++i) bytes *= static_cast<size_t>(w.shape[static_cast<size_t>(i)]);
  const int copies = options.cold ? copies_for(bytes, options.rotate_bytes) : 1;
  auto memory = std::make_shared<std::vector<gemm::Bytes>>();
  std::shared_ptr<void> on_card;
  if (data.spec().device.type == DeviceType::cuda) {
    on_card = must(copies_on_card(w.data, bytes, copies));
    data.set_stream(card_stream());
  } else {
    const auto* values = static_cast<const char*>(w.data);
    for (int i = 0; i < copies; ++i) memory->emplace_back(values, values + bytes);
  }
  auto run = [&data, memory, on_card, bytes](int copy) {
    const auto i = static_cast<size_t>(copy);
    const void* values = on_card == nullptr ? (*memory)[i].data() : static_cast<const char*>(on_card.get()) + i * bytes;
    must(data.run_again(values));
  };
  return {.name = "blocksparse", .run = run, .copies = copies};
}

Result<Contender> prepare(const Opponent& opponent, linear::LinearData& data, size_t rotate_bytes) {
  return opponent.prepare(data, rotate_bytes);
}

Result<Contender> prepare(const Opponent& opponent, conv::ConvData& data, size_t rotate_bytes) {
  if (opponent.prepare_conv != nullptr) return opponent.prepare_conv(data, rotate_bytes);
  return Status(StatusCode::unsupported, opponent.name + ": no convolutions");
}

template <class Data>
std::vector<Contender> all_contenders(Data& data, const Options& options, Row& row) {
  std::vector<Contender> contenders{ourselves(data, options)};
  for (const Opponent& opponent : opponents()) {
    if (std::find(options.opponents.begin(), options.opponents.end(), opponent.name) == options.opponents.end())
      continue;
    if (opponent.device != data.spec().device.type) continue;
    auto contender = prepare(opponent, data, options.cold ? options.rotate_bytes : 0);
    if (contender.ok()) contenders.push_back(*std::move(contender));
    else row.without.emplace_back(opponent.name, contender.status().message());
  }
  return contenders;
}

struct Measured {
  std::vector<Timing> contenders;
  double peak, bandwidth;  // FLOP/s, bytes/s
  double floor_us;         // of any call
  int samples;
};

template <class Data>
Result<Measured> time_problem(const Data& data, const std::vector<Contender>& contenders, const Options& options,
                              int threads) {
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  const Timings timings = time_all(contenders, options, {*isa, data.spec().dtype, threads});
  return Measured{timings.contenders, timings.fma_peak, read_bandwidth(threads), 0, timings.samples};
}

template <class Data>
Result<Measured> time_problem_on_card(const Data& data, const std::vector<Contender>& contenders,
                                      const Options& options) {
  constexpr double kLaunchUs = 2;  // an empty kernel in a graph
  const auto bandwidth = card_bandwidth();
  if (!bandwidth.ok()) return bandwidth.status();
  const auto peak = card_peak(data.spec().dtype, data.spec().tf32);
  if (!peak.ok()) std::fprintf(stderr, "no peak is known: %s\n", peak.status().message().c_str());
  const auto timings = time_on_card(contenders, options);
  if (!timings.ok()) return timings.status();
  return Measured{timings->contenders, peak.ok() ? *peak : INFINITY, *bandwidth, kLaunchUs, timings->samples};
}

template <class Data>
void fill_in(Row& row, const Data& data, const std::vector<Contender>& contenders, const Measured& measured,
             const Options& options) {
  row.samples = measured.samples;
  row.cold = options.cold;
  row.hot = options.hot;
  row.us = measured.contenders[0];
  for (size_t i = 1; i < contenders.size(); ++i) {
    const Contender& c = contenders[i];
    row.vs.emplace_back(c.name, measured.contenders[i]);
    std::string note = c.note;
    if (measured.contenders[i].launched) note += concat(note.empty() ? "" : ", ", "plain launches: no graph holds it");
    if (!note.empty()) row.notes.emplace_back(c.name.substr(0, c.name.find(' ')), note);
  }
  const double us = options.cold ? row.us.cold.median : row.us.hot.median;
  const double compute_us = 1e6 * data.flops() / measured.peak, memory_us = 1e6 * data.bytes() / measured.bandwidth;
  row.gflops = data.flops() / us / 1e3;
  row.peak_fraction = compute_us / us;
  row.roofline_fraction = (std::max(compute_us, memory_us) + measured.floor_us) / us;
  row.bound = compute_us >= memory_us ? "compute" : "memory";
}

template <class Data>
Status run_data(Data& data, const Options& options) {
  BS_RETURN_IF_ERROR(data.run());
  const auto& c = data.spec();
  const auto error = check_results(data);
  if (!(error.worst <= 1)) return invalid("wrong result in \"", to_string(c), "\": ", error.where);
  const auto kernel = data.kernel();
  if (!kernel.ok()) return kernel.status();

  const bool on_card = c.device.type == DeviceType::cuda;
  Row row;
  row.problem = to_string(c);
  row.kernel = *kernel;
  if constexpr (requires { data.plan(); }) row.plan = data.plan();
  row.out = data.layout().out_features();
  row.in = data.layout().in_features();
  row.density = data.layout().density();
  row.device = on_card ? "cuda: " + card_name() : "cpu: " + cpu_model();
  row.threads = on_card ? 0 : static_cast<int>(c.threads);
  row.error = error.worst;
  if (options.check_only && options.json) {
    std::printf("{\"problem\": \"%s\", \"error\": %.3g}\n", row.problem.c_str(), row.error);
    return {};
  }
  if (options.check_only) {
    std::printf("%s: right, error %.2g of its bound\n", row.problem.c_str(), row.error);
    return {};
  }
  if (data.flops() == 0) return invalid("\"", row.problem, "\" has no work to time");
  const std::vector<Contender> contenders = all_contenders(data, options, row);
  const auto timings =
      on_card ? time_problem_on_card(data, contenders, options) : time_problem(data, contenders, options, row.threads);
  if (!timings.ok()) return timings.status();
  fill_in(row, data, contenders, *timings, options);
  if (options.json) print_json(row, options.sink);
  else print_text(row);
  return {};
}

// Runs the problem with each kernel that can do it. Opponents are timed beside the first kernel only.
template <class Data>
Status run_each_kernel(Data& data, Options options) {
  for (const std::string& kernel : cuda_kernels()) {
    BS_RETURN_IF_ERROR(set_cuda_kernel(kernel));
    const Status status = run_data(data, options);
    if (status.code() == StatusCode::unsupported) continue;
    BS_RETURN_IF_ERROR(status);
    options.opponents.clear();
  }
  return {};
}

template <class Data, class Case>
Status run_case(Result<Case> c, const Options& options, int32_t usual_threads) {
  if (!c.ok()) return c.status();
  if (options.threads > 0) c->threads = options.threads;
  if (options.cuda) c->device.type = DeviceType::cuda;
  if (c->threads == 0) c->threads = usual_threads;
  // A kernel that was asked for by name gets a workspace that is enough for all kernels.
  if (options.each_kernel) BS_RETURN_IF_ERROR(set_cuda_kernel("generic"));
  auto data = Data::make(*c);
  if (!data.ok()) return data.status();
  return options.each_kernel ? run_each_kernel(*data, options) : run_data(*data, options);
}

Status run_problem(const std::string& line, const Options& options, int32_t usual_threads) {
  if (line.starts_with("conv:")) {
    return run_case<conv::ConvData>(conv::parse_conv_case(line), options, usual_threads);
  }
  return run_case<linear::LinearData>(linear::parse_linear_case(line), options, usual_threads);
}

void list_opponents() {
  for (const Opponent& opponent : opponents()) {
    const std::string where = opponent.device == DeviceType::cuda && cuda_status().ok() ? "cuda" : "cpu";
    auto data =
        linear::LinearData::make(*linear::parse_linear_case("linear:fprop f32 n=8 b=8 random(4,0.5) device=" + where));
    const auto contender = opponent.prepare(*data, 0);
    std::printf("%-12s %s\n", opponent.name.c_str(),
                contender.ok() ? contender->name.c_str() : contender.status().message().c_str());
  }
}

int run(int argc, char** argv) {
  const int32_t usual_threads = default_threads();  // before other libraries change it
  const auto options = parse_options(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "blocksparse-bench: %s\n", options.status().message().c_str());
    return 2;
  }
  if (options->help) std::fputs(kUsage, stdout);
  if (options->list && !options->reproduce) list_opponents();
  if (options->reproduce && !options->help) {
    const Status status = reproduce(*options, [&](const std::string& problem, const Options& with) {
      return run_problem(problem, with, usual_threads);
    });
    if (!status.ok()) std::fprintf(stderr, "blocksparse-bench: %s\n", status.message().c_str());
    return status.ok() ? 0 : 1;
  }
  int failures = 0;
  for (const std::string& problem : options->problems) {
    const Status status =
        options->choice.empty() ? run_problem(problem, *options, usual_threads) : print_choice(problem, *options);
    if (status.ok()) continue;
    std::fprintf(stderr, "blocksparse-bench: %s\n", status.message().c_str());
    ++failures;
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace

}  // namespace blocksparse::bench

int main(int argc, char** argv) {
  try {
    return blocksparse::bench::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("blocksparse-bench: out of memory\n", stderr);
    return 1;
  }
}

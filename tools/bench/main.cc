// blocksparse-bench: times problems given by their one line, beside other libraries and the machine's own limits.
#include <getopt.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "machine.h"
#include "opponents.h"

namespace blocksparse::bench {

namespace {

constexpr const char* kUsage =
    R"(blocksparse-bench [options] "PROBLEM" ...

A problem is one line, such as "linear:fprop f32 n=64 b=32 random(128,0.1) seed=1". Its result is compared with an f64
reference before it is timed.

  --vs LIST        opponents to time in the same run: dense (every dense library found), openblas, onednn, libxsmm, all
  --file FILE      also the problems of a file, one a line; # begins a comment
  --threads N      for every problem (its own threads=N counts otherwise)
  --isa NAME       avx512, avx2, scalar or reference
  --cold           only with weights rotated through --rotate MB (default: both cold and hot)
  --hot            only with one copy of the weights, used again and again
  --rotate MB      together larger than the caches (default 256)
  --samples N      of which the median is taken, interleaved between contenders (default 15)
  --json           one JSON object a line instead of the table
  --check          verify only, time nothing
  --list           the opponents and whether they are there
)";

struct Options {
  std::vector<std::string> problems;
  std::vector<std::string> opponents;
  int threads = 0;
  bool cold = true, hot = true, json = false, check_only = false;
  size_t rotate_bytes = size_t{256} << 20;
  int samples = 15;
};

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Timing {
  double cold = 0, hot = 0;  // us
};

// Interleaved samples, so that drift of the machine's speed hits all alike. A sample is some calls of about 2 ms.
std::vector<Timing> time_all(const std::vector<Contender>& contenders, const Options& options) {
  std::vector<std::vector<double>> cold(contenders.size()), hot(contenders.size());
  std::vector<int> calls(contenders.size()), next(contenders.size(), 0);
  for (size_t i = 0; i < contenders.size(); ++i) {
    contenders[i].run(0);
    const auto start = Clock::now();
    contenders[i].run(0);
    calls[i] = static_cast<int>(std::clamp(2000.0 / std::max(microseconds_since(start), 0.1), 1.0, 10000.0));
  }
  for (int sample = 0; sample < options.samples; ++sample) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      const Contender& c = contenders[i];
      if (options.cold) {
        const auto start = Clock::now();
        for (int k = 0; k < calls[i]; ++k) {
          c.run(next[i]);
          next[i] = (next[i] + 1) % c.copies;
        }
        cold[i].push_back(microseconds_since(start) / calls[i]);
      }
      if (options.hot) {
        c.run(0);
        const auto start = Clock::now();
        for (int k = 0; k < calls[i]; ++k) c.run(0);
        hot[i].push_back(microseconds_since(start) / calls[i]);
      }
    }
  }
  std::vector<Timing> timings;
  for (size_t i = 0; i < contenders.size(); ++i) timings.push_back({median(cold[i]), median(hot[i])});
  return timings;
}

Contender ourselves(linear::LinearData& data, const Options& options) {
  const auto bytes = static_cast<size_t>(data.weights().shape[0] * data.weights().shape[1] * data.weights().shape[2] *
                                         size_of(data.weights().dtype));
  const int copies = options.cold ? copies_for(bytes, options.rotate_bytes) : 1;
  auto memory = std::make_shared<std::vector<linear::Bytes>>();
  const auto* w = static_cast<const char*>(data.weights().data);
  for (int i = 0; i < copies; ++i) memory->emplace_back(w, w + bytes);
  return {.name = "blocksparse",
          .run =
              [&data, memory](int copy) {
                const Status status = data.run_again((*memory)[static_cast<size_t>(copy)].data());
                if (!status.ok()) {
                  std::fprintf(stderr, "%s\n", status.message().c_str());
                  std::exit(1);
                }
              },
          .copies = copies};
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

struct Row {
  std::string problem, kernel;
  int threads = 1;
  Timing us;
  double gflops = 0, peak_fraction = 0, roofline_fraction = 0, error = 0;
  std::string bound;
  std::vector<std::pair<std::string, Timing>> vs;
};

void print_json(const Row& r) {
  auto number = [](double value) { return concat(value); };
  std::string line =
      concat("{\"problem\": ", quoted(r.problem), ", \"device\": ", quoted("cpu: " + cpu_model()),
             ", \"threads\": ", r.threads, ", \"kernel\": ", quoted(r.kernel), ", \"us\": ", number(r.us.cold),
             ", \"us_hot\": ", number(r.us.hot), ", \"gflops\": ", number(r.gflops),
             ", \"peak_fraction\": ", number(r.peak_fraction), ", \"roofline_fraction\": ", number(r.roofline_fraction),
             ", \"error\": ", number(r.error), ", \"bound\": ", quoted(r.bound), ", \"vs\": {");
  std::string hot;
  for (size_t i = 0; i < r.vs.size(); ++i) {
    line += concat(i == 0 ? "" : ", ", quoted(r.vs[i].first), ": ", number(r.vs[i].second.cold));
    hot += concat(i == 0 ? "" : ", ", quoted(r.vs[i].first), ": ", number(r.vs[i].second.hot));
  }
  std::printf("%s}, \"vs_hot\": {%s}}\n", line.c_str(), hot.c_str());
  std::fflush(stdout);
}

void print_row(const Row& r) {
  std::printf(
      "%s\n  %-12s %s, %d thread%s: %.4g us cold, %.4g us hot, %.4g GFLOP/s, %.0f %% of peak, %.0f %% of roofline "
      "(%s), error %.2g of its bound\n",
      r.problem.c_str(), "blocksparse", r.kernel.c_str(), r.threads, r.threads == 1 ? "" : "s", r.us.cold, r.us.hot,
      r.gflops, 100 * r.peak_fraction, 100 * r.roofline_fraction, r.bound.c_str(), r.error);
  for (const auto& [name, us] : r.vs) {
    std::printf("  %-12s %.4g us cold (%.2fx), %.4g us hot (%.2fx)\n", name.c_str(), us.cold,
                r.us.cold > 0 ? us.cold / r.us.cold : 0, us.hot, r.us.hot > 0 ? us.hot / r.us.hot : 0);
  }
  std::fflush(stdout);
}

Status run_problem(const std::string& line, const Options& options) {
  auto c = linear::parse_linear_case(line);
  if (!c.ok()) return c.status();
  if (options.threads > 0) c->threads = options.threads;
  if (c->threads == 0) c->threads = default_threads();
  auto data = linear::LinearData::make(*c);
  if (!data.ok()) return data.status();
  BS_RETURN_IF_ERROR(data->run());
  const auto error = data->compare();
  if (!(error.worst <= 1)) return invalid("wrong result: ", error.where, " in \"", to_string(*c), "\"");
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  Row row;
  row.problem = to_string(*c);
  row.kernel = name_of(*isa);
  row.threads = static_cast<int>(c->threads);
  row.error = error.worst;
  if (options.check_only) {
    std::printf("%s: right, error %.2g of its bound\n", row.problem.c_str(), row.error);
    return {};
  }

  std::vector<Contender> contenders{ourselves(*data, options)};
  for (const Opponent& opponent : opponents()) {
    const auto wanted = std::find(options.opponents.begin(), options.opponents.end(), opponent.name);
    if (wanted == options.opponents.end()) continue;
    auto contender = opponent.prepare(*data, options.cold ? options.rotate_bytes : 0);
    if (contender.ok()) contenders.push_back(*std::move(contender));
    else std::fprintf(stderr, "without %s: %s\n", opponent.name.c_str(), contender.status().message().c_str());
  }
  const std::vector<Timing> timings = time_all(contenders, options);
  row.us = timings[0];
  for (size_t i = 1; i < contenders.size(); ++i) row.vs.emplace_back(contenders[i].name, timings[i]);

  const double us = options.cold ? row.us.cold : row.us.hot;
  const double peak = fma_peak(*isa, c->dtype, row.threads), bandwidth = read_bandwidth(row.threads);
  const double compute_us = 1e6 * data->flops() / peak, memory_us = 1e6 * data->bytes() / bandwidth;
  row.gflops = data->flops() / us / 1e3;
  row.peak_fraction = compute_us / us;
  row.roofline_fraction = std::max(compute_us, memory_us) / us;
  row.bound = compute_us >= memory_us ? "compute" : "memory";
  if (options.json) print_json(row);
  else print_row(row);
  return {};
}

void list_opponents() {
  auto c = linear::parse_linear_case("linear:fprop f32 n=8 b=8 random(4,0.5)");
  auto data = linear::LinearData::make(*c);
  for (const Opponent& opponent : opponents()) {
    const auto contender = opponent.prepare(*data, 0);
    std::printf("%-10s %s\n", opponent.name.c_str(),
                contender.ok() ? contender->name.c_str() : contender.status().message().c_str());
  }
}

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    if (end > begin) parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Status read_problems(const std::string& path, std::vector<std::string>& problems) {
  std::ifstream file(path);
  if (!file) return invalid("cannot read ", path);
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") != std::string::npos) problems.push_back(line);
  }
  return {};
}

Status choose_opponents(const std::string& list, std::vector<std::string>& chosen) {
  for (const std::string& name : split(list, ',')) {
    bool known = false;
    for (const Opponent& opponent : opponents()) {
      if (name == opponent.name || name == "all" || (name == "dense" && opponent.dense)) {
        chosen.push_back(opponent.name);
        known = true;
      }
    }
    if (!known) return invalid("there is no opponent \"", name, "\"; --list shows them");
  }
  return {};
}

Result<Options> parse_options(int argc, char** argv) {
  Options options;
  enum { kVs = 1, kFile, kThreads, kIsa, kCold, kHot, kRotate, kSamples, kJson, kCheck, kList, kHelp };
  const option table[] = {{"vs", required_argument, nullptr, kVs},
                          {"file", required_argument, nullptr, kFile},
                          {"threads", required_argument, nullptr, kThreads},
                          {"isa", required_argument, nullptr, kIsa},
                          {"cold", no_argument, nullptr, kCold},
                          {"hot", no_argument, nullptr, kHot},
                          {"rotate", required_argument, nullptr, kRotate},
                          {"samples", required_argument, nullptr, kSamples},
                          {"json", no_argument, nullptr, kJson},
                          {"check", no_argument, nullptr, kCheck},
                          {"list", no_argument, nullptr, kList},
                          {"help", no_argument, nullptr, kHelp},
                          {nullptr, 0, nullptr, 0}};
  auto positive = [](const char* name, const char* text, int64_t most) -> Result<int64_t> {
    char* end = nullptr;
    const int64_t value = std::strtoll(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value < 1 || value > most)
      return invalid(name, " ", text, ": needs 1 to ", most);
    return value;
  };
  for (int code; (code = getopt_long(argc, argv, "h", table, nullptr)) != -1;) {
    switch (code) {
      case kVs: BS_RETURN_IF_ERROR(choose_opponents(optarg, options.opponents)); break;
      case kFile: BS_RETURN_IF_ERROR(read_problems(optarg, options.problems)); break;
      case kIsa: BS_RETURN_IF_ERROR(set_cpu_isa(optarg)); break;
      case kCold: options.hot = false; break;
      case kHot: options.cold = false; break;
      case kJson: options.json = true; break;
      case kCheck: options.check_only = true; break;
      case kThreads: {
        const auto value = positive("--threads", optarg, 4096);
        if (!value.ok()) return value.status();
        options.threads = static_cast<int>(*value);
        break;
      }
      case kRotate: {
        const auto value = positive("--rotate", optarg, 1 << 16);
        if (!value.ok()) return value.status();
        options.rotate_bytes = static_cast<size_t>(*value) << 20;
        break;
      }
      case kSamples: {
        const auto value = positive("--samples", optarg, 100000);
        if (!value.ok()) return value.status();
        options.samples = static_cast<int>(*value);
        break;
      }
      case kList: list_opponents(); std::exit(0);
      case kHelp:
      case 'h': std::fputs(kUsage, stdout); std::exit(0);
      default: return invalid("see blocksparse-bench --help");
    }
  }
  if (!options.cold && !options.hot) return invalid("--cold and --hot exclude one another");
  options.problems.insert(options.problems.end(), argv + optind, argv + argc);
  if (options.problems.empty()) return invalid("no problem given; see blocksparse-bench --help");
  return options;
}

}  // namespace

int run(int argc, char** argv) {
  const auto options = parse_options(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "blocksparse-bench: %s\n", options.status().message().c_str());
    return 2;
  }
  int failures = 0;
  for (const std::string& problem : options->problems) {
    const Status status = run_problem(problem, *options);
    if (status.ok()) continue;
    std::fprintf(stderr, "blocksparse-bench: %s\n", status.message().c_str());
    ++failures;
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace blocksparse::bench

int main(int argc, char** argv) { return blocksparse::bench::run(argc, argv); }

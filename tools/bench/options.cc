#include "options.h"

#include <getopt.h>

#include <cstdlib>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "opponents.h"
#include "problems.h"

namespace blocksparse::bench {

const char* const kUsage = R"(blocksparse-bench [options] "PROBLEM" ...
blocksparse-bench [options] --reproduce [FILE or FOLDER ...]

A problem is one line, such as "linear:fprop f32 n=64 b=32 random(128,0.1) seed=1". Its result is compared with an f64
reference before it is timed.

  --device NAME    cpu, or cuda: the first card
  --vs LIST        opponents to time in the same run: dense (every dense library found), all, or of openblas, onednn,
                   libxsmm (on the CPU), cublas, cublas_tf32, cusparse_bsr, cusparse_ell (on a card)
  --file FILE      also the problems of a file or folder, one a line; # begins a comment; {a,b} stands for each in turn
  --reproduce      all problems of files or folders (default benchmarks/problems/cpu, or with --device cuda
                   benchmarks/problems/cuda) against all opponents, threads pinned, into a dated file; what it has
                   already is not measured again
  --output PATH    the folder of that file (default benchmarks/results), or its name, which ends in .jsonl
  --threads N      for every problem (its own threads=N counts otherwise)
  --isa NAME       amx, avx512_bf16, avx512, avx2, neon_bf16, neon, scalar or reference
  --cuda-kernel NAME  as BLOCKSPARSE_CUDA_KERNEL; each: all that can do a problem, in turn
  --choice CARD    hopper (H100, H200) or ampere (A100): print the family of CUDA kernels that does each linear problem
                   there, and run nothing; no card is needed
  --cold           only with weights rotated through --rotate MB (default: both cold and hot)
  --hot            only with one copy of the weights, used again and again
  --rotate MB      together larger than the caches (default 256)
  --samples N      of which the median is taken, interleaved between contenders (default 15)
  --budget SECONDS no further sample of a problem after that, and 3 samples (default none; 1 for --reproduce)
  --json           one JSON object a line instead of text
  --check          verify only, time nothing
  --list           the opponents and whether they are there; with --reproduce, the problems
)";

namespace {

Result<int64_t> positive(const char* name, const char* text, int64_t most) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 1 || value > most) {
    return invalid(name, " ", text, ": needs 1 to ", most);
  }
  return value;
}

Status choose_opponents(std::string_view list, std::vector<std::string>& chosen) {
  while (!list.empty()) {
    const std::string_view name = list.substr(0, list.find(','));
    list.remove_prefix(std::min(name.size() + 1, list.size()));
    bool known = false;
    for (const Opponent& opponent : opponents()) {
      if (name != opponent.name && name != "all" && !(name == "dense" && opponent.dense)) continue;
      chosen.push_back(opponent.name);
      known = true;
    }
    if (!known) return invalid("there is no opponent \"", name, "\"; --list shows them");
  }
  return {};
}

enum Code {
  kVs = 1,
  kDevice,
  kCudaKernel,
  kChoice,
  kFile,
  kThreads,
  kIsa,
  kCold,
  kHot,
  kRotate,
  kSamples,
  kJson,
  kCheck,
  kList,
  kHelp,
  kReproduce,
  kOutput,
  kBudget
};

Status set_option(Options& options, int code, const char* value) {
  Result<int64_t> number = int64_t{0};
  switch (code) {
    case kVs: return choose_opponents(value, options.opponents);
    case kFile: return read_problems(value, options.problems);
    case kIsa: return set_cpu_isa(value);
    case kCudaKernel:
      options.each_kernel = std::string_view(value) == "each";
      return options.each_kernel ? Status() : set_cuda_kernel(value);
    case kDevice:
      options.cuda = std::string_view(value) == "cuda";
      return options.cuda || std::string_view(value) == "cpu" ? Status() : invalid("--device ", value, ": cpu or cuda");
    case kChoice: options.choice = value; return {};
    case kCold: options.hot = false; return {};
    case kHot: options.cold = false; return {};
    case kJson: options.json = true; return {};
    case kCheck: options.check_only = true; return {};
    case kList: options.list = true; return {};
    case kHelp: options.help = true; return {};
    case kReproduce: options.reproduce = true; return {};
    case kOutput: options.output = value; return {};
    case kBudget: number = positive("--budget", value, 100000); break;
    case kThreads: number = positive("--threads", value, 4096); break;
    case kRotate: number = positive("--rotate", value, 1 << 16); break;
    case kSamples: number = positive("--samples", value, 100000); break;
    default: return invalid("see blocksparse-bench --help");
  }
  if (!number.ok()) return number.status();
  if (code == kThreads) options.threads = static_cast<int>(*number);
  if (code == kRotate) options.rotate_bytes = static_cast<size_t>(*number) << 20;
  if (code == kBudget) options.budget_s = static_cast<double>(*number);
  if (code == kSamples) options.samples = static_cast<int>(*number);
  return {};
}

}  // namespace

Result<Options> parse_options(int argc, char** argv) {
  const option table[] = {{"vs", required_argument, nullptr, kVs},
                          {"file", required_argument, nullptr, kFile},
                          {"threads", required_argument, nullptr, kThreads},
                          {"isa", required_argument, nullptr, kIsa},
                          {"device", required_argument, nullptr, kDevice},
                          {"cuda-kernel", required_argument, nullptr, kCudaKernel},
                          {"choice", required_argument, nullptr, kChoice},
                          {"cold", no_argument, nullptr, kCold},
                          {"hot", no_argument, nullptr, kHot},
                          {"rotate", required_argument, nullptr, kRotate},
                          {"samples", required_argument, nullptr, kSamples},
                          {"json", no_argument, nullptr, kJson},
                          {"check", no_argument, nullptr, kCheck},
                          {"list", no_argument, nullptr, kList},
                          {"help", no_argument, nullptr, kHelp},
                          {"reproduce", no_argument, nullptr, kReproduce},
                          {"output", required_argument, nullptr, kOutput},
                          {"budget", required_argument, nullptr, kBudget},
                          {nullptr, 0, nullptr, 0}};
  Options options;
  for (int code; (code = getopt_long(argc, argv, "", table, nullptr)) != -1;) {
    BS_RETURN_IF_ERROR(set_option(options, code, optarg));
  }
  if (!options.cold && !options.hot) return invalid("--cold and --hot exclude one another");
  if (!options.choice.empty() && options.reproduce) return invalid("--choice and --reproduce exclude one another");
  auto& rest = options.reproduce ? options.paths : options.problems;
  rest.insert(rest.end(), argv + optind, argv + argc);
  const bool idle = options.list || options.help || options.reproduce;
  if (options.problems.empty() && !idle) return invalid("no problem given; see blocksparse-bench --help");
  return options;
}

}  // namespace blocksparse::bench

#include "reproduce.h"

#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <vector>

#include "affinity.h"
#include "blocksparse/blocksparse.h"
#include "blocksparse/graphs.h"
#include "card.h"
#include "commit.h"
#include "core/text.h"
#include "machine.h"
#include "opponents.h"
#include "problems.h"
#include "report.h"

namespace blocksparse::bench {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char *kProblems = "benchmarks/problems/cpu", *kProblemsOnCard = "benchmarks/problems/cuda";
constexpr const char* kResults = "benchmarks/results";
constexpr double kBudgetSeconds = 1;
constexpr std::string_view kHeader = "{\"header\": ", kProblem = "{\"problem\": \"", kDate = ", \"date\": ";

// ---- the list of work

struct Job {
  std::string problem;
  int threads;
  double work;  // in proportion to the time that it takes
};

double tokens_of(const linear::LinearCase& c) { return static_cast<double>(c.n); }

double tokens_of(const conv::ConvCase& c) {
  auto tokens = static_cast<double>(c.n);
  for (size_t i = 0; i < static_cast<size_t>(c.geometry.rank); ++i) {
    tokens *= static_cast<double>(c.size[i] * c.geometry.kernel[i]);
  }
  return tokens;
}

template <class Case>
Result<Job> job_of_case(const std::string& line, Result<Case> c, const Options& options) {
  if (!c.ok()) return c.status();
  if (options.cuda) c->device.type = DeviceType::cuda;
  if (c->device.type == DeviceType::cuda && !options.cuda) return invalid("\"", line, "\" needs --device cuda");
  if (options.threads > 0) c->threads = options.threads;
  if (c->threads == 0) return invalid("\"", line, "\" needs its number of threads");
  const auto blocks = graphs::by_name(c->graph, c->seed);
  if (!blocks.ok()) return blocks.status();
  const auto features = static_cast<double>(blocks->out_blocks * blocks->in_blocks * c->block * c->block);
  const auto sides = static_cast<double>((blocks->out_blocks + blocks->in_blocks) * c->block);
  const double n = tokens_of(*c);
  // Seconds on two busy cores. A card's own time is little beside the time to make the data and copy it.
  const double work = options.cuda ? 1 + 2e-8 * features + 5e-8 * n * sides : 0.3 + features * (7e-7 + 3e-9 * n);
  return Job{to_string(*c), static_cast<int>(c->threads), work};
}

Result<Job> job_of(const std::string& line, const Options& options) {
  if (line.starts_with("conv:")) return job_of_case(line, conv::parse_conv_case(line), options);
  return job_of_case(line, linear::parse_linear_case(line), options);
}

Result<std::vector<Job>> all_jobs(const Options& options, size_t processors) {
  std::vector<std::string> lines;
  for (const std::string& path : options.paths) BS_RETURN_IF_ERROR(read_problems(path, lines));
  std::vector<Job> jobs;
  std::set<std::string> known;
  size_t too_wide = 0;
  for (const std::string& line : lines) {
    auto job = job_of(line, options);
    if (!job.ok()) return job.status();
    if (static_cast<size_t>(job->threads) > processors) ++too_wide;
    else if (known.insert(job->problem).second) jobs.push_back(*std::move(job));
  }
  if (too_wide > 0) std::fprintf(stderr, "without %zu problems of more than %zu threads\n", too_wide, processors);
  return jobs;
}

// ---- the file

std::string utc(const char* format) {
  const std::time_t now = std::time(nullptr);
  char text[64];
  std::strftime(text, sizeof(text), format, std::gmtime(&now));
  return text;
}

// "AMD EPYC 7B13 64-Core Processor avx2": "amd-epyc-7b13-64-core-avx2".
std::string file_name_of(const std::string& device) {
  std::string name, word;
  for (char c : device + " ") {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      continue;
    }
    const bool empty = word.empty() || word == "r" || word == "tm" || word == "cpu" || word == "processor";
    if (!empty) name += name.empty() ? word : "-" + word;
    word.clear();
  }
  return name;
}

std::string compiler() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

struct Candidate {
  std::string name;  // as in --vs
  bool there = false;
  std::string text;  // its version, or why it is missing
};

std::vector<Candidate> candidates_of(const std::vector<std::string>& chosen, bool cuda) {
  const DeviceType device = cuda ? DeviceType::cuda : DeviceType::cpu;
  auto data = linear::LinearData::make(
      *linear::parse_linear_case(concat("linear:fprop f32 n=16 b=16 balanced(4,2)", cuda ? " device=cuda" : "")));
  std::vector<Candidate> candidates;
  if (!data.ok()) return candidates;
  for (const Opponent& opponent : opponents()) {
    if (opponent.device != device) continue;
    if (std::find(chosen.begin(), chosen.end(), opponent.name) == chosen.end()) continue;
    const auto contender = opponent.prepare(*data, 0);
    std::string text = contender.ok() ? contender->name : contender.status().message();
    if (text.starts_with(opponent.name + " ")) text.erase(0, opponent.name.size() + 1);
    candidates.push_back({opponent.name, contender.ok(), text});
  }
  return candidates;
}

// {"openblas": "0.3.30", "libxsmm": "no libxsmm.so ..."}
std::string json_of(const std::vector<Candidate>& candidates) {
  std::string text = "{";
  for (const Candidate& c : candidates)
    text += concat(text.size() == 1 ? "" : ", ", json_string(c.name), ": ", json_string(c.text));
  return text + "}";
}

// "beside us: openblas 0.3.34; not there: libxsmm (no libxsmm.so ...)"
std::string sentence_of(const std::vector<Candidate>& candidates) {
  std::string there, missing;
  for (const Candidate& c : candidates) {
    if (c.there) there += concat(there.empty() ? "" : ", ", c.name, " ", c.text);
    else missing += concat(missing.empty() ? "; not there: " : ", ", c.name, " (", c.text, ")");
  }
  return concat("beside us: ", there.empty() ? "nothing" : there, missing);
}

// Everything but the date. A file is continued only if this is equal.
std::string header_of(const Options& options, std::string_view isa, const std::vector<int>& processors,
                      const std::vector<Candidate>& candidates) {
  utsname os{};
  (void)uname(&os);
  std::string list;
  for (int i : processors) list += concat(list.empty() ? "" : ", ", i);
  const std::string device =
      options.cuda
          ? concat(json_string("cuda: " + card_name()), ", ", card_facts(), ", \"host\": ", json_string(cpu_model()))
          : concat(json_string("cpu: " + cpu_model()), ", \"isa\": ", json_string(isa), ", \"processors\": [", list,
                   "], \"pinned\": \"T threads to the first T processors\"");
  return concat(kHeader, "1, \"device\": ", device,
                ", \"os\": ", json_string(concat(os.sysname, " ", os.release, " ", os.machine)),
                ", \"compiler\": ", json_string(compiler()), ", \"library\": ", json_string(version()),
                ", \"commit\": ", json_string(BS_COMMIT), ", \"opponents\": ", json_of(candidates),
                ", \"samples\": ", options.samples, ", \"budget_s\": ", options.budget_s,
                ", \"rotate_mb\": ", options.rotate_bytes >> 20);
}

// `device` is the CPU's model and instruction set, or the card's name.
Result<std::string> path_of(const std::string& output, const std::string& device) {
  const fs::path path = output;
  if (path.extension() == ".jsonl") return path.string();
  std::error_code error;
  if (!fs::is_directory(path, error)) return invalid("there is no folder ", output, "; --output names one");
  return (path / concat(utc("%Y-%m-%d"), "-", file_name_of(device), ".jsonl")).string();
}

// The problems that an earlier run left in a file. A line that it did not finish is cut off.
Result<std::set<std::string>> problems_in(const std::string& path, const std::string& header) {
  std::set<std::string> problems;
  std::ifstream file(path);
  uintmax_t whole = 0;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    if (whole == 0 && line.substr(0, line.find(kDate)) != header) {
      return invalid(path,
                     " is of another machine, build, options or opponents: take it away, or name another --output");
    }
    whole += line.size() + 1;
    if (line.rfind(kProblem, 0) != 0) continue;
    problems.insert(line.substr(kProblem.size(), line.find('"', kProblem.size()) - kProblem.size()));
  }
  if (std::error_code error; file.is_open() && fs::file_size(path, error) != whole) {
    fs::resize_file(path, whole, error);
    if (error) return invalid("cannot mend ", path, ": ", error.message());
  }
  return problems;
}

// ---- the run

std::string duration(double seconds) {
  const auto s = static_cast<int>(seconds + 0.5);
  return s < 60 ? concat(s, " s") : concat(s / 60, " min ", s % 60, " s");
}

int measure_all(const std::vector<Job>& jobs, const std::vector<int>& processors, const Options& options,
                const Measure& measure) {
  double work = 0, done = 0;
  for (const Job& job : jobs) work += job.work;
  int failures = 0;
  const auto start = Clock::now();
  for (size_t i = 0; i < jobs.size(); ++i) {
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    const std::string left = i == 0 ? "" : concat(", ", duration(spent * (work - done) / done), " left");
    std::fprintf(stderr, "%zu/%zu  %s%s  %s\n", i + 1, jobs.size(), duration(spent).c_str(), left.c_str(),
                 jobs[i].problem.c_str());
    Status status = options.cuda ? Status() : confine(processors, jobs[i].threads);
    if (status.ok()) status = measure(jobs[i].problem, options);
    if (status.ok() && std::ferror(options.sink) != 0) status = invalid("the results cannot be written");
    if (!status.ok()) std::fprintf(stderr, "blocksparse-bench: %s\n", status.message().c_str());
    failures += status.ok() ? 0 : 1;
    done += jobs[i].work;
  }
  return failures;
}

}  // namespace

Status reproduce(Options options, const Measure& measure) {
  if (options.paths.empty()) options.paths = {options.cuda ? kProblemsOnCard : kProblems};
  if (options.output.empty()) options.output = kResults;
  if (options.budget_s == 0) options.budget_s = kBudgetSeconds;
  if (options.opponents.empty()) {
    for (const Opponent& opponent : opponents()) options.opponents.push_back(opponent.name);
  }
  options.json = true;
  const std::vector<int> processors = usable_processors();
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  auto jobs = all_jobs(options, processors.size());
  if (!jobs.ok()) return jobs.status();
  if (options.list) {
    for (const Job& job : *jobs) std::printf("%s\n", job.problem.c_str());
    return {};
  }
  if (options.cuda) BS_RETURN_IF_ERROR(cuda_status());
  const std::string model = cpu_model();
  const auto path = path_of(options.output,
                            options.cuda ? card_name() : concat(model.substr(0, model.find('@')), " ", name_of(*isa)));
  if (!path.ok()) return path.status();
  const std::vector<Candidate> candidates = candidates_of(options.opponents, options.cuda);
  std::fprintf(stderr, "%s\n", sentence_of(candidates).c_str());
  const std::string header = header_of(options, name_of(*isa), processors, candidates);
  const auto there = problems_in(*path, header);
  if (!there.ok()) return there.status();
  const size_t all = jobs->size();
  std::erase_if(*jobs, [&](const Job& job) { return there->count(job.problem) > 0; });
  std::fprintf(stderr, "%zu problems, %zu of them there already: %s\n", all, all - jobs->size(), path->c_str());

  std::error_code error;
  const bool fresh = fs::file_size(*path, error) == 0 || error;
  options.sink = std::fopen(path->c_str(), "a");
  if (options.sink == nullptr) return invalid("cannot write ", *path);
  if (fresh)
    std::fprintf(options.sink, "%s%s\"%s\"}\n", header.c_str(), kDate.data(), utc("%Y-%m-%dT%H:%M:%SZ").c_str());
  const int failures = measure_all(*jobs, processors, options, measure);
  const bool closed = std::fclose(options.sink) == 0;
  if (!closed) return invalid("cannot write ", *path);
  if (failures > 0) return invalid(failures, " problems failed; the same command tries them again");
  std::printf("%s\n", path->c_str());
  return {};
}

}  // namespace blocksparse::bench

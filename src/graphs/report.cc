#include <algorithm>
#include <bit>
#include <numeric>

#include "blocksparse/graphs.h"
#include "core/text.h"

namespace blocksparse::graphs {

namespace {

constexpr int64_t kMaxStarts = 1024, kMinStarts = 16;
constexpr int64_t kMaxVisits = int64_t{1} << 28;  // of blocks, by all searches for shortest paths together: seconds

// Successors of each block: the out blocks that read in block i.
struct Successors {
  std::vector<int32_t> start, to;
  int64_t blocks() const { return std::max<int64_t>(1, static_cast<int64_t>(to.size())); }
  std::span<const int32_t> of(int64_t i) const {
    return std::span(to).subspan(
        static_cast<size_t>(start[static_cast<size_t>(i)]),
        static_cast<size_t>(start[static_cast<size_t>(i) + 1] - start[static_cast<size_t>(i)]));
  }
};

struct Csr {
  std::vector<int32_t> start, columns;
};

Csr csr_of(const Layout& layout) {  // of the matrix that is meant, transposed or not
  const Layout plain = layout.transposed() ? layout.t() : layout;
  Csr csr{plain.row_start(), plain.columns()};
  if (!layout.transposed()) return csr;
  Csr flipped{std::vector<int32_t>(static_cast<size_t>(layout.out_blocks()) + 1, 0),
              std::vector<int32_t>(csr.columns.size())};
  for (int32_t column : csr.columns) ++flipped.start[static_cast<size_t>(column) + 1];
  std::partial_sum(flipped.start.begin(), flipped.start.end(), flipped.start.begin());
  std::vector<int32_t> next = flipped.start;
  for (size_t row = 0; row + 1 < csr.start.size(); ++row) {
    for (int32_t i = csr.start[row]; i < csr.start[row + 1]; ++i) {
      flipped.columns[static_cast<size_t>(next[static_cast<size_t>(csr.columns[static_cast<size_t>(i)])]++)] =
          static_cast<int32_t>(row);
    }
  }
  return flipped;
}

Successors successors_of(const Layout& layout) {
  const Csr csr = csr_of(layout.t());
  return {csr.start, csr.columns};
}

Degrees degrees_of(std::span<const int32_t> start) {
  std::vector<int64_t> lengths;
  for (size_t i = 0; i + 1 < start.size(); ++i) lengths.push_back(start[i + 1] - start[i]);
  if (lengths.empty()) return {};
  std::sort(lengths.begin(), lengths.end());
  const size_t half = lengths.size() / 2;
  const double median = lengths.size() % 2 == 1 ? static_cast<double>(lengths[half])
                                                : static_cast<double>(lengths[half - 1] + lengths[half]) / 2;
  return {lengths.front(), median, lengths.back()};
}

// Evenly spaced: all nodes of a small layout, fewer the more blocks a large one has.
std::vector<int64_t> starts_of(int64_t nodes, int64_t blocks) {
  const int64_t most = nodes <= kMaxStarts ? nodes : std::clamp(kMaxVisits / blocks, kMinStarts, kMaxStarts);
  const int64_t count = std::min(nodes, most);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < count; ++i) starts.push_back(i * nodes / count);
  return starts;
}

// Lengths of shortest paths from evenly spaced starts, breadth first.
void measure_paths(const Successors& next, int64_t nodes, Report& report) {
  const std::vector<int64_t> starts = starts_of(nodes, next.blocks());
  std::vector<int64_t> distance(static_cast<size_t>(nodes));
  std::vector<int64_t> queue;
  double total = 0, reached = 0;
  for (int64_t start : starts) {
    std::fill(distance.begin(), distance.end(), -1);
    distance[static_cast<size_t>(start)] = 0;
    queue.assign(1, start);
    for (size_t head = 0; head < queue.size(); ++head) {
      const int64_t node = queue[head], steps = distance[static_cast<size_t>(node)];
      total += static_cast<double>(steps);
      report.diameter = std::max(report.diameter, steps);
      for (int32_t to : next.of(node)) {
        if (distance[static_cast<size_t>(to)] >= 0) continue;
        distance[static_cast<size_t>(to)] = steps + 1;
        queue.push_back(to);
      }
    }
    reached += static_cast<double>(queue.size() - 1);
  }
  const double pairs = static_cast<double>(starts.size()) * static_cast<double>(nodes - 1);
  report.mean_path = reached > 0 ? total / reached : 0;
  report.unreachable = pairs > 0 ? 1 - reached / pairs : 0;
}

// Mean local clustering: triangles through a node over pairs of its neighbours, averaged over nodes.
double mean_clustering(const Csr& csr, const Successors& next, int64_t nodes) {
  std::vector<std::vector<int32_t>> neighbours(static_cast<size_t>(nodes));
  for (int64_t node = 0; node < nodes; ++node) {
    auto& list = neighbours[static_cast<size_t>(node)];
    const auto first = csr.start[static_cast<size_t>(node)], last = csr.start[static_cast<size_t>(node) + 1];
    list.assign(csr.columns.begin() + first, csr.columns.begin() + last);
    const auto out = next.of(node);
    list.insert(list.end(), out.begin(), out.end());
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    std::erase(list, static_cast<int32_t>(node));
  }
  std::vector<char> marked(static_cast<size_t>(nodes), 0);
  double sum = 0;
  const std::vector<int64_t> sample = starts_of(nodes, next.blocks());
  for (int64_t node : sample) {
    const auto& list = neighbours[static_cast<size_t>(node)];
    for (int32_t n : list) marked[static_cast<size_t>(n)] = 1;
    int64_t links = 0;  // each counted from both ends
    for (int32_t n : list) {
      for (int32_t m : neighbours[static_cast<size_t>(n)]) links += marked[static_cast<size_t>(m)];
    }
    for (int32_t n : list) marked[static_cast<size_t>(n)] = 0;
    const double pairs = static_cast<double>(list.size()) * (static_cast<double>(list.size()) - 1);
    if (pairs > 0) sum += static_cast<double>(links) / pairs;
  }
  return sum / static_cast<double>(sample.size());
}

// Mean share of blocks reached after step 1, 2, ..., until `steps` are over or nothing more is reached. Each node has a
// bit for each start, so a block is looked at once a step and not once a start.
std::vector<double> measure_mix(std::span<const Successors> steps, int64_t nodes, bool repeat) {
  const std::vector<int64_t> starts = starts_of(nodes, steps.front().blocks());
  const size_t words = (starts.size() + 63) / 64, all = static_cast<size_t>(nodes) * words;
  std::vector<double> mix;
  std::vector<uint64_t> from(all, 0), to(all);
  for (size_t s = 0; s < starts.size(); ++s) {
    from[static_cast<size_t>(starts[s]) * words + s / 64] |= uint64_t{1} << s % 64;
  }
  for (size_t step = 0; repeat || step < steps.size(); ++step) {
    const Successors& next = steps[std::min(step, steps.size() - 1)];
    std::fill(to.begin(), to.end(), 0);
    for (int64_t node = 0; node < nodes; ++node) {
      const uint64_t* mine = from.data() + static_cast<size_t>(node) * words;
      for (int32_t n : next.of(node)) {
        uint64_t* theirs = to.data() + static_cast<size_t>(n) * words;
        for (size_t w = 0; w < words; ++w) theirs[w] |= mine[w];
      }
    }
    std::swap(from, to);
    int64_t total = 0;
    for (uint64_t word : from) total += std::popcount(word);
    const double share = static_cast<double>(total) / (static_cast<double>(starts.size()) * static_cast<double>(nodes));
    if (repeat && !mix.empty() && (share <= mix.back() || mix.size() >= 64)) break;
    mix.push_back(share);
  }
  return mix;
}

}  // namespace

Report report(const Layout& layout) {
  Report r;
  r.blocks = layout.blocks();
  r.density = layout.density();
  const Csr csr = csr_of(layout);
  const Successors next = successors_of(layout);
  r.out = degrees_of(csr.start);
  r.in = degrees_of(next.start);
  const int64_t nodes = layout.out_blocks();
  if (nodes != layout.in_blocks() || nodes == 0) return r;
  r.symmetric = csr.start == next.start && csr.columns == next.to;
  r.sampled = nodes > kMaxStarts;
  measure_paths(next, nodes, r);
  r.clustering = mean_clustering(csr, next, nodes);
  r.mix = measure_mix(std::span(&next, 1), nodes, true);
  return r;
}

Result<std::vector<double>> mix(std::span<const Layout> layouts) {
  std::vector<Successors> steps;
  for (const Layout& layout : layouts) {
    if (layout.out_blocks() != layout.in_blocks() || layout.out_blocks() != layouts.front().out_blocks()) {
      return invalid("[mix] layout ", steps.size(), " has ", layout.out_blocks(), " x ", layout.in_blocks(),
                     " blocks, all need to be square and of one size, here ", layouts.front().out_blocks());
    }
    steps.push_back(successors_of(layout));
  }
  if (steps.empty() || layouts.front().out_blocks() == 0) return std::vector<double>();
  return measure_mix(steps, layouts.front().out_blocks(), false);
}

}  // namespace blocksparse::graphs

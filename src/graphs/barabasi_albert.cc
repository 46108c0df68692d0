#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "blocksparse/graphs.h"
#include "core/random.h"
#include "graphs/checks.h"
#include "graphs/undirected.h"

namespace blocksparse::graphs {

namespace {

// Adds `extra` links, each from the node of lowest degree (the first of them) to a random node that it is not linked
// with.
Status add_extra(UndirectedGraph& graph, int64_t extra, Random& rng) {
  std::set<std::pair<int64_t, int64_t>> by_degree;  // (degree, node)
  for (int64_t node = 0; node < graph.nodes(); ++node) by_degree.insert({graph.degree(node), node});
  for (int64_t i = 0; i < extra; ++i) {
    const int64_t node = by_degree.begin()->second;
    if (graph.full(node)) return invalid("[ba] extra is ", extra, ", after ", i, " the graph is complete");
    int64_t other = rng.below(graph.nodes());
    while (graph.has(node, other)) other = rng.below(graph.nodes());
    for (int64_t end : {node, other}) by_degree.erase({graph.degree(end), end});
    graph.add(node, other);
    for (int64_t end : {node, other}) by_degree.insert({graph.degree(end), end});
  }
  return {};
}

// Of different pairs of nodes; and the diagonal.
BlockCoordinates both_directions(int64_t nodes, const std::vector<int32_t>& pairs) {
  BlockCoordinates c{.out_blocks = nodes, .in_blocks = nodes, .out = pairs, .in = {}};
  c.out.reserve(pairs.size() + static_cast<size_t>(nodes));
  c.in.reserve(pairs.size() + static_cast<size_t>(nodes));
  for (size_t i = 0; i < pairs.size(); i += 2) c.in.insert(c.in.end(), {pairs[i + 1], pairs[i]});
  for (int32_t node = 0; node < nodes; ++node) {
    c.out.push_back(node);
    c.in.push_back(node);
  }
  return c;
}

}  // namespace

Result<BlockCoordinates> barabasi_albert(int64_t nodes, int64_t links, int64_t extra, int64_t seed) {
  BS_RETURN_IF_ERROR(check_nodes("ba", nodes));
  BS_RETURN_IF_ERROR(check_seed("ba", seed));
  if (links < 1 || links >= nodes) {
    return invalid("[ba] links is ", links, ", needs 1 to ", nodes - 1, " (fewer than the ", nodes, " blocks)");
  }
  if (extra < 0) return invalid("[ba] extra is ", extra, ", needs 0 or more");
  BS_RETURN_IF_ERROR(check_blocks(
      "ba", static_cast<double>(nodes) * (2.0 * static_cast<double>(links) + 1) + 2.0 * static_cast<double>(extra)));
  Random rng(static_cast<uint64_t>(seed));
  // Pairs of nodes. Each node is there as often as it has links, so a uniform draw favours well-linked nodes.
  std::vector<int32_t> ends;
  ends.reserve(static_cast<size_t>(2 * links * (nodes - links) + links * (links - 1)));
  auto link = [&ends](int64_t a, int64_t b) {
    ends.push_back(static_cast<int32_t>(a));
    ends.push_back(static_cast<int32_t>(b));
  };
  std::vector<int32_t> targets, drawn_by(static_cast<size_t>(nodes), -1);
  for (int64_t node = 0; node < links; ++node) targets.push_back(static_cast<int32_t>(node));
  for (int64_t node = links; node < nodes; ++node) {
    for (int32_t target : targets) link(node, target);
    targets.clear();
    while (static_cast<int64_t>(targets.size()) < links) {
      const int32_t target = ends[static_cast<size_t>(rng.below(static_cast<int64_t>(ends.size())))];
      if (std::exchange(drawn_by[static_cast<size_t>(target)], static_cast<int32_t>(node)) != node) {
        targets.push_back(target);
      }
    }
  }
  for (int64_t a = 0; a < links; ++a) {
    for (int64_t b = a + 1; b < links; ++b) link(a, b);
  }
  if (extra == 0) return both_directions(nodes, ends);
  UndirectedGraph graph(nodes, static_cast<int64_t>(ends.size() / 2) + extra);
  for (size_t i = 0; i < ends.size(); i += 2) graph.add(ends[i], ends[i + 1]);
  BS_RETURN_IF_ERROR(add_extra(graph, extra, rng));
  return graph.coordinates();
}

}  // namespace blocksparse::graphs

#include <algorithm>
#include <vector>

#include "blocksparse/graphs.h"
#include "core/random.h"
#include "graphs/checks.h"
#include "graphs/undirected.h"

namespace blocksparse::graphs {

namespace {

struct Edge {
  int64_t from, to;
};

Status check_neighbours(const char* graph, int64_t nodes, int64_t neighbours) {
  if (neighbours < 0 || neighbours % 2 != 0 || neighbours >= nodes) {
    return invalid("[", graph, "] neighbours is ", neighbours, ", needs an even number from 0 to ", nodes - 1);
  }
  return check_blocks(graph, static_cast<double>(nodes) * static_cast<double>(neighbours + 1));
}

// Moves the far end of each edge, in the order of `edges`, with probability `rewire`.
Result<BlockCoordinates> rewired(int64_t nodes, const std::vector<Edge>& edges, double rewire, int64_t seed) {
  UndirectedGraph graph(nodes, static_cast<int64_t>(edges.size()));
  for (const Edge& edge : edges) graph.add(edge.from, edge.to);
  Random rng(static_cast<uint64_t>(seed));
  for (const Edge& edge : edges) {
    if (rng.uniform() >= rewire || graph.full(edge.from)) continue;
    int64_t to = rng.below(nodes);
    while (graph.has(edge.from, to)) to = rng.below(nodes);
    graph.remove(edge.from, edge.to);
    graph.add(edge.from, to);
  }
  return graph.coordinates();
}

// Half of the steps to the `neighbours` nearest nodes of a torus. The other half are their opposites.
struct Step {
  int64_t down, right;
};

Result<std::vector<Step>> nearest_steps(int64_t height, int64_t width, int64_t neighbours) {
  std::vector<Step> steps;
  for (int64_t down = 0; down <= height / 2; ++down) {
    for (int64_t right = -(width / 2); right <= width / 2; ++right) {
      const bool upper_half = down > 0 || right > 0;
      if (upper_half) steps.push_back({down, right});
    }
  }
  std::stable_sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) {
    return a.down * a.down + a.right * a.right < b.down * b.down + b.right * b.right;
  });
  if (static_cast<int64_t>(steps.size()) < neighbours / 2) steps.clear();
  else steps.resize(static_cast<size_t>(neighbours / 2));
  // On a small torus two steps can lead to one node. The graph then does not exist.
  UndirectedGraph around(height * width);
  auto node = [&](int64_t r, int64_t c) { return (r + height) % height * width + (c + width) % width; };
  bool distinct = static_cast<int64_t>(steps.size()) == neighbours / 2;
  for (const Step& step : steps) {
    distinct = distinct && around.add(0, node(step.down, step.right)) && around.add(0, node(-step.down, -step.right));
  }
  if (!distinct) {
    return invalid("[ws2d] a torus of ", height, " x ", width, " is too small for ", neighbours, " nearest neighbours");
  }
  return steps;
}

}  // namespace

Result<BlockCoordinates> watts_strogatz(int64_t nodes, int64_t neighbours, double rewire, int64_t seed) {
  BS_RETURN_IF_ERROR(check_nodes("ws", nodes));
  BS_RETURN_IF_ERROR(check_seed("ws", seed));
  BS_RETURN_IF_ERROR(check_neighbours("ws", nodes, neighbours));
  BS_RETURN_IF_ERROR(check_probability("ws", "rewire", rewire));
  std::vector<Edge> edges;
  edges.reserve(static_cast<size_t>(nodes * neighbours / 2));
  for (int64_t distance = 1; distance <= neighbours / 2; ++distance) {
    for (int64_t node = 0; node < nodes; ++node) edges.push_back({node, (node + distance) % nodes});
  }
  return rewired(nodes, edges, rewire, seed);
}

Result<BlockCoordinates> watts_strogatz_torus(int64_t height, int64_t width, int64_t neighbours, double rewire,
                                              int64_t seed) {
  BS_RETURN_IF_ERROR(check_nodes("ws2d", height));
  BS_RETURN_IF_ERROR(check_nodes("ws2d", width));
  BS_RETURN_IF_ERROR(check_nodes("ws2d", height * width));
  BS_RETURN_IF_ERROR(check_seed("ws2d", seed));
  BS_RETURN_IF_ERROR(check_neighbours("ws2d", height * width, neighbours));
  BS_RETURN_IF_ERROR(check_probability("ws2d", "rewire", rewire));
  const auto steps = nearest_steps(height, width, neighbours);
  if (!steps.ok()) return steps.status();
  std::vector<Edge> edges;
  edges.reserve(steps->size() * static_cast<size_t>(height * width));
  for (const Step& step : *steps) {
    for (int64_t r = 0; r < height; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        const int64_t to = (r + step.down) % height * width + (c + step.right + width) % width;
        edges.push_back({r * width + c, to});
      }
    }
  }
  return rewired(height * width, edges, rewire, seed);
}

}  // namespace blocksparse::graphs

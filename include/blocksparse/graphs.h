// Generators of block patterns, and a report of what a pattern connects.
//
// Every generator is a pure function of its arguments and seed (0 or more): every platform and compiler makes the same
// blocks.
// The undirected graphs (Watts-Strogatz, Barabasi-Albert) give symmetric patterns that keep the diagonal.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/status.h"

namespace blocksparse::graphs {

// Every block.
BS_EXPORT Result<BlockCoordinates> dense(int64_t out_blocks, int64_t in_blocks);

// round(density * out_blocks * in_blocks) blocks, every such set equally likely.
BS_EXPORT Result<BlockCoordinates> random(int64_t out_blocks, int64_t in_blocks, double density, int64_t seed);

// `degree` blocks in every row; columns differ by one at most. A regular pattern, mixed by 16 edge swaps a block. With
// `diagonal` each row of a square pattern has its diagonal block among them, which recurrent matrices need.
BS_EXPORT Result<BlockCoordinates> balanced_random(int64_t out_blocks, int64_t in_blocks, int64_t degree, int64_t seed,
                                                   bool diagonal = false);

// Nodes on a ring, each linked to its `neighbours` nearest (an even number); every link then moves one end to a random
// node with probability `rewire`. Exactly nodes * (neighbours + 1) blocks.
// Source: Watts and Strogatz, Nature 393:440 (1998).
BS_EXPORT Result<BlockCoordinates> watts_strogatz(int64_t nodes, int64_t neighbours, double rewire, int64_t seed);

// Watts-Strogatz on a torus of height x width nodes: node (r, c) is block r * width + c, and "nearest" is by Euclidean
// distance. Exactly height * width * (neighbours + 1) blocks.
BS_EXPORT Result<BlockCoordinates> watts_strogatz_torus(int64_t height, int64_t width, int64_t neighbours,
                                                        double rewire, int64_t seed);

// Nodes join one by one, each linked to `links` earlier ones with probability ~ their degree; the first `links` nodes
// are linked with one another as well. Then `extra` links follow, each from the node of lowest degree (the first of
// them) to a random one. Blocks: 2 links (nodes - links) + nodes + links (links - 1) + 2 extra. With extra = links
// (links + 1) / 2 that is nodes (2 links + 1), as many as Watts-Strogatz with 2 * links neighbours. Source: Barabasi
// and Albert, Science 286:509 (1999).
BS_EXPORT Result<BlockCoordinates> barabasi_albert(int64_t nodes, int64_t links, int64_t extra, int64_t seed);

// Groups of `group` consecutive blocks, each connected to itself alone; the last group may be smaller.
BS_EXPORT Result<BlockCoordinates> block_diagonal(int64_t nodes, int64_t group);

// |out - in| <= width.
BS_EXPORT Result<BlockCoordinates> banded(int64_t nodes, int64_t width);

// The union of the factors of a butterfly network: out == in, or they differ in one bit. nodes is a power of two.
// Source: Dao et al., Pixelated Butterfly, ICLR 2022 ("flat block butterfly").
BS_EXPORT Result<BlockCoordinates> butterfly(int64_t nodes);

// By name, with positional or named arguments:
//   dense(out[,in])                 random(out[,in],density)              balanced(out[,in],degree[,diagonal=1])
//   ws(nodes,neighbours,rewire)     ws2d(height,width,neighbours,rewire)  ba(nodes,links[,extra=E | blocks=B])
//   diagonal(nodes[,group])         banded(nodes,width)                   butterfly(nodes)
BS_EXPORT Result<BlockCoordinates> by_name(std::string_view name, int64_t seed);

struct Degrees {
  int64_t min = 0;
  double median = 0;
  int64_t max = 0;
};

struct Report {
  int64_t blocks = 0;
  double density = 0;
  Degrees out;             // blocks in a row (inputs of an out block)
  Degrees in;              // blocks in a column (outputs of an in block)
  bool symmetric = false;  // block (i, j) exists exactly when (j, i) does
  // The fields below are for square grids only, otherwise 0. Paths run from input to output.
  double mean_path = 0;     // mean length of the shortest paths between different blocks, where there is one
  int64_t diameter = 0;     // the longest of them
  double unreachable = 0;   // share of ordered pairs without a path
  double clustering = 0;    // mean local clustering of the undirected graph, diagonal left out
  std::vector<double> mix;  // share of blocks reached from one after 1, 2, ... steps, mean over starts
  bool sampled = false;     // paths and mix are of evenly spaced starts, not of all
};

// O(min(out_blocks, 1024) * blocks).
BS_EXPORT Report report(const Layout& layout);

// Share of blocks reached after each step when step i goes through layouts[i] (a network with a layout of its own for
// each internal step). All must be square and of one size.
BS_EXPORT Result<std::vector<double>> mix(std::span<const Layout> layouts);

}  // namespace blocksparse::graphs

/* A block-sparse linear layer in C. */
// [readme]
#include <blocksparse/c_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 32 };

int main(void) {
  const bs_blocking blocking = {.block_size = 16};
  bs_layout* layout = NULL;
  bs_layout_view view;
  if (bs_layout_from_graph("ba(64,4)", 0, &blocking, &layout) || bs_layout_get_view(layout, &view)) {
    return fprintf(stderr, "%s\n", bs_last_error()), 1;
  }
  const int64_t in = view.in_features, out = view.out_features, b = view.block_size, blocks = view.blocks;
  float *x = calloc(N * in, sizeof *x), *w = calloc(blocks * b * b, sizeof *w), *y = calloc(N * out, sizeof *y);
  const bs_tensor of_x = {x, BS_F32, BS_CPU, 0, 2, {N, in}, {in, 1}};
  const bs_tensor of_w = {w, BS_F32, BS_CPU, 0, 3, {blocks, b, b}, {b * b, b, 1}};
  const bs_tensor of_y = {y, BS_F32, BS_CPU, 0, 2, {N, out}, {out, 1}};
  const size_t bytes = bs_linear_fprop_workspace_size(&view, BS_F32, N);
  const bs_workspace workspace = {malloc(bytes), bytes};
  const bs_stream stream = {.threads = 0}; /* as many as there are */

  const bs_status status = bs_linear_fprop(&view, &of_x, &of_w, NULL, NULL, &of_y, workspace, stream);
  if (status) fprintf(stderr, "%s\n", bs_last_error());
  bs_layout_free(layout);
  free(workspace.data), free(x), free(w), free(y);
  return status;
}
// [readme]

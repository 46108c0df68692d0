/* The C interface as a C program uses it: results against plain loops, and every kind of error. */
#include "c_api_test.h"

#include <stdlib.h>

int failures = 0;

static bs_tensor matrix(float* data, int64_t n, int64_t features) {
  bs_tensor t = {data, BS_F32, BS_CPU, 0, 2, {n, features}, {features, 1}};
  return t;
}

static bs_tensor blocks_of(float* data, const bs_layout_view* layout) {
  const int64_t b = layout->block_size;
  bs_tensor t = {data, BS_F32, BS_CPU, 0, 3, {layout->blocks, b, b}, {b * b, b, 1}};
  return t;
}

enum { B = 8, N = 5, OUT = 3 * B, IN = 2 * B };

/* W: blocks (0, 1), (2, 0), (2, 1). */
static void test_products(void) {
  const uint8_t mask[6] = {0, 1, 0, 0, 1, 1};
  const bs_blocking blocking = {B, 0, 0};
  bs_layout* layout = NULL;
  bs_layout_view view;
  float x[N * IN], dy[N * OUT], w[3 * B * B], y[N * OUT], dx[N * IN], dw[3 * B * B], dense[OUT * IN] = {0};
  int row_of[3] = {0, 2, 2}, column_of[3] = {1, 0, 1};
  EXPECT(bs_layout_from_mask(mask, 3, 2, &blocking, &layout) == BS_OK);
  EXPECT(bs_layout_get_view(layout, &view) == BS_OK);
  for (int i = 0; i < N * IN; ++i) x[i] = (float)(i % 7 - 3);
  for (int i = 0; i < N * OUT; ++i) dy[i] = (float)(i % 5 - 2);
  for (int i = 0; i < 3 * B * B; ++i) w[i] = (float)(i % 11 - 5);
  for (int block = 0; block < 3; ++block) {
    for (int i = 0; i < B * B; ++i) {
      dense[(row_of[block] * B + i / B) * IN + column_of[block] * B + i % B] = w[block * B * B + i];
    }
  }

  size_t size = bs_linear_fprop_workspace_size(&view, BS_F32, N);
  const size_t other = bs_linear_dgrad_workspace_size(&view, BS_F32, N),
               third = bs_linear_wgrad_workspace_size(&view, BS_F32, N);
  size = size > other ? size : other;
  size = size > third ? size : third;
  const bs_workspace workspace = {malloc(size), size};
  const bs_stream stream = {NULL, 1, BS_MATH_TF32};
  const bs_tensor tx = matrix(x, N, IN), tdy = matrix(dy, N, OUT), ty = matrix(y, N, OUT), tdx = matrix(dx, N, IN);
  const bs_tensor tw = blocks_of(w, &view), tdw = blocks_of(dw, &view);
  EXPECT(bs_linear_fprop(&view, &tx, &tw, NULL, NULL, &ty, workspace, stream) == BS_OK);
  EXPECT(bs_linear_dgrad(&view, &tdy, &tw, NULL, &tdx, workspace, stream) == BS_OK);
  EXPECT(bs_linear_wgrad(&view, 1, &tx, &tdy, NULL, NULL, 0, &tdw, NULL, workspace, stream) == BS_OK);
  for (int n = 0; n < N; ++n) {
    for (int o = 0; o < OUT; ++o) {
      float sum = 0;
      for (int i = 0; i < IN; ++i) sum += dense[o * IN + i] * x[n * IN + i];
      EXPECT(y[n * OUT + o] == sum);
    }
    for (int i = 0; i < IN; ++i) {
      float sum = 0;
      for (int o = 0; o < OUT; ++o) sum += dense[o * IN + i] * dy[n * OUT + o];
      EXPECT(dx[n * IN + i] == sum);
    }
  }
  for (int block = 0; block < 3; ++block) {
    for (int i = 0; i < B * B; ++i) {
      float sum = 0;
      for (int n = 0; n < N; ++n) {
        sum += dy[n * OUT + row_of[block] * B + i / B] * x[n * IN + column_of[block] * B + i % B];
      }
      EXPECT(dw[block * B * B + i] == sum);
    }
  }
  float dbias[OUT];
  const bs_tensor tdbias = {dbias, BS_F32, BS_CPU, 0, 1, {OUT}, {1}};
  EXPECT(bs_bias_gradient_workspace_size(&tdy) == 0);
  EXPECT(bs_bias_gradient(&tdy, &tdbias, workspace, stream) == BS_OK);
  for (int o = 0; o < OUT; ++o) {
    float sum = 0;
    for (int n = 0; n < N; ++n) sum += dy[n * OUT + o];
    EXPECT(dbias[o] == sum);
  }
  EXPECT(bs_bias_gradient_workspace_size(NULL) == 0);
  EXPECT_ERROR(bs_bias_gradient(NULL, &tdbias, workspace, stream), BS_INVALID_ARGUMENT, "dy is NULL");
  EXPECT_ERROR(bs_bias_gradient(&tx, &tdbias, workspace, stream), BS_INVALID_ARGUMENT, "dbias is [24]");
  float twice[3 * B * B];
  bs_tensor ttwice = tdw;
  ttwice.data = twice;
  const bs_tensor xs[2] = {tx, tx}, dys[2] = {tdy, tdy};
  EXPECT(bs_linear_wgrad(&view, 2, xs, dys, NULL, NULL, 0, &ttwice, NULL, workspace, stream) == BS_OK);
  for (int i = 0; i < 3 * B * B; ++i) EXPECT(twice[i] == 2 * dw[i]);

  EXPECT_ERROR(bs_linear_fprop(NULL, &tx, &tw, NULL, NULL, &ty, workspace, stream), BS_INVALID_ARGUMENT,
               "layout is NULL");
  EXPECT_ERROR(bs_linear_fprop(&view, NULL, &tw, NULL, NULL, &ty, workspace, stream), BS_INVALID_ARGUMENT, "x is NULL");
  EXPECT_ERROR(bs_linear_fprop(&view, &tx, NULL, NULL, NULL, &ty, workspace, stream), BS_INVALID_ARGUMENT, "w is NULL");
  EXPECT_ERROR(bs_linear_fprop(&view, &tx, &tw, NULL, NULL, NULL, workspace, stream), BS_INVALID_ARGUMENT, "y is NULL");
  EXPECT_ERROR(bs_linear_dgrad(&view, &tdy, &tw, NULL, NULL, workspace, stream), BS_INVALID_ARGUMENT, "dx is NULL");
  EXPECT_ERROR(bs_linear_wgrad(&view, 1, NULL, &tdy, NULL, NULL, 0, &tdw, NULL, workspace, stream), BS_INVALID_ARGUMENT,
               "x is NULL");
  EXPECT_ERROR(bs_linear_wgrad(&view, -1, &tx, &tdy, NULL, NULL, 0, &tdw, NULL, workspace, stream), BS_INVALID_ARGUMENT,
               "pairs is -1");
  EXPECT_ERROR(bs_linear_wgrad(&view, 1, &tx, &tdy, NULL, NULL, 2, &tdw, NULL, workspace, stream), BS_INVALID_ARGUMENT,
               "accumulate is 2");
  EXPECT_ERROR(bs_linear_fprop(&view, &tdy, &tw, NULL, NULL, &ty, workspace, stream), BS_INVALID_ARGUMENT,
               "x is [5, 24], layout needs [N, 16]");
  const bs_workspace none = {NULL, 0};
  EXPECT_ERROR(bs_linear_fprop(&view, &tx, &tw, NULL, NULL, &ty, none, stream), BS_INVALID_ARGUMENT,
               "workspace has 0 bytes");
  const bs_stream odd = {NULL, 1, 2};
  EXPECT_ERROR(bs_linear_fprop(&view, &tx, &tw, NULL, NULL, &ty, workspace, odd), BS_INVALID_ARGUMENT, "math is 2");
  bs_tensor on_cuda = tx;
  on_cuda.device_type = BS_CUDA;
  bs_tensor nowhere = tx;
  nowhere.device_type = 7;
  EXPECT_ERROR(bs_linear_fprop(&view, &nowhere, &tw, NULL, NULL, &ty, workspace, stream), BS_INVALID_ARGUMENT,
               "[linear_fprop] a tensor's device type is 7, needs 0 (CPU) or 1 (CUDA)");
  if (bs_cuda_status() != BS_OK) {
    EXPECT_ERROR(bs_linear_fprop(&view, &on_cuda, &tw, NULL, NULL, &ty, workspace, stream), BS_UNAVAILABLE, "CUDA");
  }
  EXPECT(bs_linear_fprop(&view, &tx, &tw, NULL, NULL, &ty, workspace, stream) == BS_OK);
  EXPECT(strcmp(bs_last_error(), "") == 0);
  EXPECT(bs_linear_fprop_workspace_size(NULL, BS_F32, 5) == 0);
  EXPECT(bs_linear_fprop_workspace_size(&view, 17, 5) == 0);
  free(workspace.data);
  bs_layout_free(layout);
}

static void test_layouts(void) {
  const bs_blocking blocking = {32, 0, 0}, odd = {33, 0, 0};
  bs_layout *ba = NULL, *same = NULL, *t = NULL, *none = NULL;
  bs_layout_info info;
  bs_layout_view view;
  bs_report report;
  int32_t equal = -1;
  EXPECT(bs_layout_from_graph("ba(48,4)", 1, &blocking, &ba) == BS_OK);
  EXPECT(bs_layout_get_info(ba, &info) == BS_OK);
  EXPECT(info.out_features == 48 * 32 && info.blocks == 2 * 4 * 44 + 48 + 12 && info.transposed == 0);

  int32_t* pattern = malloc((size_t)info.pattern_words * sizeof(int32_t));
  EXPECT(bs_layout_pattern(ba, pattern) == BS_OK);
  EXPECT(bs_layout_from_pattern(pattern, info.pattern_words, &same) == BS_OK);
  EXPECT(bs_layout_equal(ba, same, &equal) == BS_OK && equal == 1);
  pattern[20] ^= 1;
  EXPECT_ERROR(bs_layout_from_pattern(pattern, info.pattern_words, &none), BS_INVALID_ARGUMENT, "damaged");
  EXPECT_ERROR(bs_layout_from_pattern(pattern, 3, &none), BS_INVALID_ARGUMENT, "no saved layout");
  free(pattern);

  int32_t* starts = malloc(49 * sizeof(int32_t));
  int32_t* columns = malloc((size_t)info.blocks * sizeof(int32_t));
  EXPECT(bs_layout_csr(ba, starts, columns) == BS_OK && starts[48] == info.blocks);
  free(starts);
  free(columns);

  EXPECT(bs_layout_t(ba, &t) == BS_OK);
  EXPECT(bs_layout_equal(ba, t, &equal) == BS_OK && equal == 0);
  EXPECT(bs_layout_get_view(t, &view) == BS_OK && view.transposed == 1);
  EXPECT(bs_layout_view_from_index(view.index, info.index_words, &view) == BS_OK && view.transposed == 0);
  int32_t* for_card = malloc((size_t)info.index_words * sizeof(int32_t));
  EXPECT(bs_layout_index_for_card(t, for_card) == BS_OK);
  bs_layout_view moved;
  EXPECT(bs_layout_view_from_index(for_card, info.index_words, &moved) == BS_OK && moved.blocks == info.blocks);
  EXPECT_ERROR(bs_layout_index_for_card(t, NULL), BS_INVALID_ARGUMENT, "index is NULL");
  free(for_card);
  EXPECT_ERROR(bs_layout_view_from_index(view.index, 7, &view), BS_INVALID_ARGUMENT, "index has 7 words");
  EXPECT(bs_layout_view_on_device(info.index_words, &view) == BS_OK);
  view.transposed = 1;
  EXPECT(bs_layout_view_on_device(info.index_words, &view) == BS_OK && view.transposed == 1);
  view.blocks += 100;
  EXPECT_ERROR(bs_layout_view_on_device(info.index_words, &view), BS_INVALID_ARGUMENT, "features need");
  EXPECT_ERROR(bs_layout_view_on_device(1, NULL), BS_INVALID_ARGUMENT, "view is NULL");
  EXPECT(bs_layout_report(ba, &report) == BS_OK && report.symmetric == 1 && report.mix_steps >= 2);
  const bs_layout* steps[2] = {ba, ba};
  double mix[2];
  EXPECT(bs_layout_mix(steps, 2, mix) == BS_OK && mix[0] == report.mix[0] && mix[1] == report.mix[1]);

  const int64_t row_start[3] = {0, 1, 2}, cols[2] = {1, 0};
  const int32_t out[2] = {0, 1}, in[2] = {1, 0};
  bs_layout *csr = NULL, *coordinates = NULL;
  EXPECT(bs_layout_from_csr(row_start, cols, 2, 2, &blocking, &csr) == BS_OK);
  EXPECT(bs_layout_from_coordinates(out, in, 2, 2, 2, &blocking, &coordinates) == BS_OK);
  EXPECT(bs_layout_equal(csr, coordinates, &equal) == BS_OK && equal == 1);

  EXPECT_ERROR(bs_layout_from_graph("ba(4,8)", 0, &blocking, &none), BS_INVALID_ARGUMENT, "links is 8");
  EXPECT_ERROR(bs_layout_from_graph("ba(40,4)", -1, &blocking, &none), BS_INVALID_ARGUMENT, "seed is -1");
  EXPECT_ERROR(bs_layout_from_graph("ba(40,4)", 0, &odd, &none), BS_INVALID_ARGUMENT, "block_size is 33");
  EXPECT_ERROR(bs_layout_from_graph(NULL, 0, &blocking, &none), BS_INVALID_ARGUMENT, "name is NULL");
  EXPECT_ERROR(bs_layout_from_graph("ba(40,4)", 0, NULL, &none), BS_INVALID_ARGUMENT, "blocking is NULL");
  EXPECT_ERROR(bs_layout_from_graph("ba(40,4)", 0, &blocking, NULL), BS_INVALID_ARGUMENT, "layout is NULL");
  EXPECT_ERROR(bs_layout_from_mask(NULL, 2, 2, &blocking, &none), BS_INVALID_ARGUMENT, "mask is NULL");
  EXPECT_ERROR(bs_layout_from_coordinates(out, NULL, 2, 2, 2, &blocking, &none), BS_INVALID_ARGUMENT, "in is NULL");
  EXPECT_ERROR(bs_layout_from_coordinates(out, in, -2, 2, 2, &blocking, &none), BS_INVALID_ARGUMENT, "blocks is -2");
  EXPECT_ERROR(bs_layout_from_csr(NULL, cols, 2, 2, &blocking, &none), BS_INVALID_ARGUMENT, "row_start is NULL");
  EXPECT_ERROR(bs_layout_from_csr(row_start, cols, -2, 2, &blocking, &none), BS_INVALID_ARGUMENT, "out_blocks is -2");
  const int64_t falling[2] = {0, -1};
  EXPECT_ERROR(bs_layout_from_csr(falling, cols, 1, 2, &blocking, &none), BS_INVALID_ARGUMENT,
               "row_start ends with -1");
  EXPECT_ERROR(bs_layout_get_info(NULL, &info), BS_INVALID_ARGUMENT, "layout is NULL");
  EXPECT_ERROR(bs_layout_mix(NULL, 2, mix), BS_INVALID_ARGUMENT, "layouts is NULL");
  EXPECT(none == NULL);
  bs_layout_free(ba);
  bs_layout_free(same);
  bs_layout_free(t);
  bs_layout_free(csr);
  bs_layout_free(coordinates);
  bs_layout_free(NULL);
}

static void test_machine(void) {
  const char* isa = NULL;
  EXPECT(bs_abi_version() == BS_ABI_VERSION);
  EXPECT(strlen(bs_version()) >= 5);
  EXPECT(strstr(bs_cpu_isas(), "scalar") != NULL);
  EXPECT(bs_set_cpu_isa("scalar") == BS_OK && bs_cpu_isa(&isa) == BS_OK && strcmp(isa, "scalar") == 0);
  EXPECT_ERROR(bs_set_cpu_isa("z80"), BS_INVALID_ARGUMENT, "there is no \"z80\"");
  EXPECT(bs_set_cpu_isa("") == BS_OK);
  if (*bs_cuda_kernels() != '\0') {
    EXPECT(strstr(bs_cuda_kernels(), "generic") != NULL && bs_set_cuda_kernel("generic") == BS_OK);
    EXPECT_ERROR(bs_set_cuda_kernel("fastest"), BS_INVALID_ARGUMENT, "there is no kernel \"fastest\"");
    EXPECT(bs_set_cuda_kernel("") == BS_OK);
  } else {
    EXPECT_ERROR(bs_set_cuda_kernel("generic"), BS_UNAVAILABLE, "built without CUDA");
  }
  EXPECT(bs_cuda_prepare(-1) != BS_OK);
  EXPECT(bs_cuda_leave_multiprocessors(-1) != BS_OK);
  EXPECT(bs_default_threads() >= 1);
  EXPECT(strstr(bs_torch_register("linear", BS_CPU), "is not loaded") != NULL);
  int32_t ours[2], theirs[2];
  bs_xla_versions(ours, theirs);
  EXPECT(ours[0] == 0 && ours[1] >= 1 && theirs[0] == -1 && theirs[1] == -1);
}

int main(void) {
  test_machine();
  test_layouts();
  test_products();
  test_conv();
  test_glu();
  test_recurrent();
  printf(failures == 0 ? "all as it should be\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

/* The C interface of gated linear units, by numbers that are known without it, and its errors. */
#include <math.h>

#include "c_api_test.h"

static float silu(float z) { return z / (1 + expf(-z)); }

/* W has rows of ones for the gate, of twos for up: with x = .25 in all of 16 inputs the gate is 4, up is 8. */
static void test_product(void) {
  enum { N = 3, IN = 16, HIDDEN = 12, OUT = 32 };
  const bs_blocking blocking = {.block_size = 16};
  bs_layout* layout = NULL;
  bs_layout_view view;
  EXPECT(bs_layout_from_graph("dense(2,1)", 0, &blocking, &layout) == BS_OK);
  EXPECT(bs_layout_get_view(layout, &view) == BS_OK);
  static float x_data[N * IN], w_data[OUT * IN], y_data[N * HIDDEN], bias_data[OUT];
  for (int i = 0; i < N * IN; ++i) x_data[i] = 0.25f;
  for (int i = 0; i < OUT * IN; ++i) w_data[i] = i / IN % 16 < 8 ? 1 : 2;
  for (int i = 0; i < OUT; ++i) bias_data[i] = i % 16 < 8 ? 0 : -3;
  const bs_tensor x = {x_data, BS_F32, BS_CPU, 0, 2, {N, IN}, {IN, 1}};
  const bs_tensor w = {w_data, BS_F32, BS_CPU, 0, 3, {2, 16, 16}, {256, 16, 1}};
  const bs_tensor bias = {bias_data, BS_F32, BS_CPU, 0, 1, {OUT}, {1}};
  const bs_tensor y = {y_data, BS_F32, BS_CPU, 0, 2, {N, HIDDEN}, {HIDDEN, 1}};
  const bs_epilogue epilogue = {&bias, NULL, BS_ACTIVATION_SILU}, none = {NULL, NULL, BS_ACTIVATION_NONE};
  const bs_epilogue residual = {NULL, &y, BS_ACTIVATION_SILU};
  static char memory[1 << 16];
  const bs_workspace workspace = {memory, sizeof memory};
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  EXPECT(bs_linear_glu_fprop_workspace_size(&view, BS_F32, N) <= sizeof memory);
  EXPECT(bs_linear_glu_fprop_workspace_size(NULL, BS_F32, N) == 0);
  EXPECT(bs_linear_glu_fprop(&view, &x, &w, NULL, &epilogue, &y, workspace, stream) == BS_OK);
  for (int i = 0; i < N * HIDDEN; ++i) EXPECT(fabsf(y_data[i] - silu(4) * 5) < 1e-4f);
  EXPECT(bs_linear_glu_fprop(&view, &x, &w, NULL, &none, &y, workspace, stream) == BS_OK && y_data[0] == 32);
  EXPECT_ERROR(bs_linear_glu_fprop(&view, NULL, &w, NULL, NULL, &y, workspace, stream), BS_INVALID_ARGUMENT,
               "x is NULL");
  EXPECT_ERROR(bs_linear_glu_fprop(&view, &x, &w, NULL, &residual, &y, workspace, stream), BS_INVALID_ARGUMENT,
               "residual is given");
  EXPECT_ERROR(bs_linear_glu_fprop(&view, &x, &w, NULL, NULL, &x, workspace, stream), BS_INVALID_ARGUMENT, "overlap");
  bs_layout_free(layout);
}

static void test_pointwise(void) {
  enum { N = 2, HIDDEN = 3, Z = 16 };
  static float z_data[N * Z], y_data[N * HIDDEN], dy_data[N * HIDDEN], dz_data[N * Z];
  for (int i = 0; i < N * Z; ++i) z_data[i] = i % 16 < 8 ? 1.5f : 2;
  for (int i = 0; i < N * HIDDEN; ++i) dy_data[i] = 1;
  const bs_tensor z = {z_data, BS_F32, BS_CPU, 0, 2, {N, Z}, {Z, 1}};
  const bs_tensor y = {y_data, BS_F32, BS_CPU, 0, 2, {N, HIDDEN}, {HIDDEN, 1}};
  bs_tensor dy = y, dz = z;
  dy.data = dy_data, dz.data = dz_data;
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  EXPECT(bs_glu_forward(&z, BS_ACTIVATION_SILU, &y, stream) == BS_OK);
  EXPECT(fabsf(y_data[0] - silu(1.5f) * 2) < 1e-6f && fabsf(y_data[N * HIDDEN - 1] - silu(1.5f) * 2) < 1e-6f);
  EXPECT(bs_glu_backward(&z, &dy, BS_ACTIVATION_GELU_TANH, &dz, stream) == BS_OK);
  EXPECT(bs_glu_backward(&z, &dy, BS_ACTIVATION_RELU, &dz, stream) == BS_OK);
  EXPECT(dz_data[0] == 2 && dz_data[8] == 1.5f);
  EXPECT(dz_data[3] == 0 && dz_data[11] == 0); /* only fill up the eight */
  EXPECT_ERROR(bs_glu_forward(&y, BS_ACTIVATION_SILU, &y, stream), BS_INVALID_ARGUMENT, "z is [2, 3], needs 16");
  EXPECT_ERROR(bs_glu_forward(&z, 9, &y, stream), BS_INVALID_ARGUMENT, "activation is 9");
  EXPECT_ERROR(bs_glu_backward(&z, NULL, BS_ACTIVATION_SILU, &dz, stream), BS_INVALID_ARGUMENT, "dy is NULL");
}

void test_glu(void) {
  test_product();
  test_pointwise();
}

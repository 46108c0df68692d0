/* Convolutions as a C program calls them: results against plain loops, and what is refused. */
#include "c_api_test.h"

enum { B = 8 };

static char memory[1 << 20];

/* One block with three taps, with and without padding, and the two questions about sizes. */
static void test_passes(void) {
  enum { TAPS = 3, N = 2, W = 5 };
  bs_layout* layout = NULL;
  const uint8_t mask[] = {1};
  const bs_blocking blocking = {B, 0, 0};
  EXPECT(bs_layout_from_mask(mask, 1, 1, &blocking, &layout) == BS_OK);
  bs_layout_view view;
  EXPECT(bs_layout_get_view(layout, &view) == BS_OK);
  const bs_conv_geometry geometry = {1, 0, {TAPS}, {1}, {1}, {1}, {1}, {0}};
  const int64_t size = W;
  int64_t output = 0;
  EXPECT(bs_conv_output_size(&geometry, &size, &output) == BS_OK && output == W);
  const bs_conv_geometry transposed = {1, 1, {TAPS}, {3}, {2}, {2}, {1}, {2}};
  EXPECT(bs_conv_output_size(&transposed, &size, &output) == BS_OK && output == (W - 1) * 3 - 3 + 2 * 2 + 1 + 2);
  float x[N * B * W], y[N * B * W], dx[N * B * W], w[TAPS * B * B], dw[TAPS * B * B];
  for (int i = 0; i < N * B * W; ++i) x[i] = (float)(i % 5 - 2);
  for (int i = 0; i < TAPS * B * B; ++i) w[i] = (float)(i % 7 - 3);
  const bs_tensor tx = {x, BS_F32, BS_CPU, 0, 3, {N, B, W}, {B * W, W, 1}};
  bs_tensor ty = tx, tdx = tx;
  ty.data = y;
  tdx.data = dx;
  const bs_tensor tw = {w, BS_F32, BS_CPU, 0, 4, {1, TAPS, B, B}, {TAPS * B * B, B * B, B, 1}};
  bs_tensor tdw = tw;
  tdw.data = dw;
  const bs_workspace workspace = {memory, sizeof memory};
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  int32_t order[B];
  for (int i = 0; i < B; ++i) order[i] = B - 1 - i;
  EXPECT(bs_conv_fprop_workspace_size(&view, &geometry, &tx, order) <= sizeof memory);
  EXPECT(bs_conv_dgrad_workspace_size(&view, &geometry, &tx, order) <= sizeof memory);
  EXPECT(bs_conv_wgrad_workspace_size(&view, &geometry, &tx, order) <= sizeof memory);
  EXPECT(bs_conv_fprop_workspace_size(NULL, &geometry, &tx, NULL) == 0);
  EXPECT(bs_conv_fprop(&view, &geometry, &tx, &tw, NULL, order, NULL, &ty, workspace, stream) == BS_OK);
  EXPECT(bs_conv_dgrad(&view, &geometry, &tx, &tw, NULL, order, &tdx, workspace, stream) == BS_OK);
  EXPECT(bs_conv_wgrad(&view, &geometry, &tx, &tx, NULL, NULL, order, 0, &tdw, NULL, workspace, stream) == BS_OK);
  float sums[3] = {0, 0, 0};  // of y[1, 3, 2], dx[1, 3, 2] (channel 3 is input 4) and dw[0, 2, 1, 4]
  for (int tap = 0; tap < TAPS; ++tap) {
    for (int c = 0; c < B; ++c) {
      sums[0] += w[(tap * B + 3) * B + c] * x[(B + order[c]) * W + 1 + tap];
      sums[1] += w[(tap * B + c) * B + 4] * x[(B + c) * W + 3 - tap];
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int p = 0; p + 1 < W; ++p) sums[2] += x[(n * B + 1) * W + p] * x[(n * B + order[4]) * W + p + 1];
  }
  EXPECT(y[(B + 3) * W + 2] == sums[0]);
  EXPECT(dx[(B + 3) * W + 2] == sums[1]);
  EXPECT(dw[(2 * B + 1) * B + 4] == sums[2]);
  EXPECT_ERROR(bs_conv_fprop(&view, NULL, &tx, &tw, NULL, NULL, NULL, &ty, workspace, stream), BS_INVALID_ARGUMENT,
               "geometry is NULL");
  EXPECT_ERROR(bs_conv_wgrad(&view, &geometry, &tx, &tx, NULL, NULL, NULL, 3, &tdw, NULL, workspace, stream),
               BS_INVALID_ARGUMENT, "accumulate is 3");
  bs_layout_free(layout);
}

/* All that is wrong with a call that a case spoils in one place: the three passes and the question about sizes. */
enum { C = 16, K = 24, H = 4, SIDE = 3, FILTERS = SIDE * SIDE, IMAGES = 2 };

typedef struct call {
  bs_layout* layout;
  bs_layout_view view;
  bs_conv_geometry geometry;
  bs_tensor x, y, w;
  int32_t order[C];
} call;

static float x_data[IMAGES * C * H * H], y_data[IMAGES * K * H * H], w_data[6 * FILTERS * B * B];

static bs_tensor images(float* data, int64_t channels) {
  bs_tensor t = {data, BS_F32, BS_CPU, 0, 4, {IMAGES, channels, H, H}, {channels * H * H, H * H, H, 1}};
  return t;
}

static call right_call(void) {
  call c = {.geometry = {2, 0, {SIDE, SIDE}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, {0}}};
  const bs_blocking blocking = {B, 0, 0};
  EXPECT(bs_layout_from_graph("dense(3,2)", 0, &blocking, &c.layout) == BS_OK);
  EXPECT(bs_layout_get_view(c.layout, &c.view) == BS_OK);
  c.x = images(x_data, C);
  c.y = images(y_data, K);
  const bs_tensor w = {w_data, BS_F32, BS_CPU, 0, 4, {6, FILTERS, B, B}, {FILTERS * B * B, B * B, B, 1}};
  c.w = w;
  for (int i = 0; i < C; ++i) c.order[i] = i;
  return c;
}

static bs_status run(const call* c, int pass) {
  const bs_workspace workspace = {memory, sizeof memory};
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  const bs_layout_view* v = &c->view;
  const bs_conv_geometry* g = &c->geometry;
  if (pass == 0) return bs_conv_fprop(v, g, &c->x, &c->w, NULL, c->order, NULL, &c->y, workspace, stream);
  if (pass == 1) return bs_conv_dgrad(v, g, &c->y, &c->w, NULL, c->order, &c->x, workspace, stream);
  return bs_conv_wgrad(v, g, &c->x, &c->y, NULL, NULL, c->order, 0, &c->w, NULL, workspace, stream);
}

static void refused(const call* c, const char* text) {
  for (int pass = 0; pass < 3; ++pass) EXPECT_ERROR(run(c, pass), BS_INVALID_ARGUMENT, text);
}

static void geometry_refused(const call* c, const char* text) {
  const int64_t size[BS_MAX_SIZES] = {H, H, H};
  int64_t output[BS_MAX_SIZES];
  refused(c, text);
  EXPECT_ERROR(bs_conv_output_size(&c->geometry, size, output), BS_INVALID_ARGUMENT, text);
  EXPECT(bs_conv_fprop_workspace_size(&c->view, &c->geometry, &c->x, c->order) == 0);
}

static void test_bad_geometries(const call* right) {
  call c = *right;
  c.geometry.rank = 4;
  geometry_refused(&c, "the geometry has rank 4, needs 1 to 3");
  c = *right;
  c.geometry.transposed = 7;
  geometry_refused(&c, "transposed is 7, needs 0 or 1");
  c = *right;
  c.geometry.stride[1] = 0;
  geometry_refused(&c, "stride is [1, 0], needs 1 to");
  c = *right;
  c.geometry.padding_before[0] = -1;
  geometry_refused(&c, "padding_before is [-1, 1], needs 0 to");
  c = *right;
  c.geometry.kernel[0] = 9;
  geometry_refused(&c, "covers 9 pixels, more than the 6 of an image of [4, 4] with its padding");
  c = *right;
  c.geometry.dilation[1] = 3;
  geometry_refused(&c, "with dilation [1, 3] covers 7 pixels, more than the 6");
  c = *right;
  c.geometry.transposed = 1;
  c.geometry.padding_before[1] = c.geometry.padding_after[1] = 4;
  geometry_refused(&c, "would give one of size -2");
}

static void test_bad_tensors(const call* right) {
  call c = *right;
  c.x.shape[1] = C - 1;
  refused(&c, "x is [2, 15, 4, 4], needs [n, 16] and 2 sizes");
  c = *right;
  c.y.shape[1] = K + 8;
  refused(&c, "is [2, 32, 4, 4], needs [n, 24] and 2 sizes");
  c = *right;
  c.w.shape[1] = 3;
  c.w.stride[0] = (int64_t)3 * B * B;
  refused(&c, "w is [6, 3, 8, 8], needs [6, 9, 8, 8]");
  c = *right;
  c.geometry.stride[0] = 2;
  refused(&c, "needs n = 2 and sizes [2, 4]");
  c = *right;
  const int64_t channels_last[4] = {(int64_t)K * H * H, 1, (int64_t)K * H, K};
  memcpy(c.y.stride, channels_last, sizeof channels_last);
  refused(&c, "has strides [384, 1, 96, 24], which are not contiguous");
  c = *right;
  c.y.device_type = 7;
  refused(&c, "device type is 7, needs 0 (CPU) or 1 (CUDA)");
  c = *right;
  c.order[5] = 4;
  refused(&c, "channel_order holds channel 4 twice");
  c = *right;
  c.order[5] = C;
  refused(&c, "channel_order[5] is 16, needs 0 to 15");
}

void test_conv(void) {
  test_passes();
  const call right = right_call();
  for (int pass = 0; pass < 3; ++pass) EXPECT(run(&right, pass) == BS_OK);
  test_bad_geometries(&right);
  test_bad_tensors(&right);
  bs_layout_free(right.layout);
}

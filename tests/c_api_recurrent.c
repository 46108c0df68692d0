/* The C interface of recurrent networks: one step after another is known without them, and their errors. */
#include <math.h>

#include "c_api_test.h"

/* With W = 0 the state is a function of pre alone: pre = 0 halves c at every step. */
static void test_lstm(void) {
  enum { STEPS = 3, N = 2, H = 8 };
  const bs_blocking blocking = {.block_size = 8};
  bs_layout *gate = NULL, *layout = NULL, *none = NULL;
  bs_layout_view view;
  EXPECT(bs_layout_from_graph("diagonal(1)", 0, &blocking, &gate) == BS_OK);
  EXPECT(bs_layout_stack(gate, 4, &layout) == BS_OK && bs_layout_get_view(layout, &view) == BS_OK);
  EXPECT_ERROR(bs_layout_stack(gate, 0, &none), BS_INVALID_ARGUMENT, "times is 0");
  EXPECT_ERROR(bs_layout_stack(NULL, 4, &none), BS_INVALID_ARGUMENT, "layout is NULL");

  static float pre_data[STEPS * N * 4 * H], w_data[4 * H * H], c0_data[N * H], y_data[STEPS * N * H], h_data[N * H],
      c_data[N * H], gates_data[STEPS * N * 4 * H], cells_data[STEPS * N * H], dw_data[4 * H * H], dc0_data[N * H],
      dpre_data[STEPS * N * 4 * H];
  const int64_t lengths[N] = {3, 1};
  const bs_tensor pre = {pre_data, BS_F32, BS_CPU, 0, 4, {STEPS, N, 4, H}, {N * 4 * H, 4 * H, H, 1}};
  const bs_tensor w = {w_data, BS_F32, BS_CPU, 0, 3, {4, H, H}, {H * H, H, 1}};
  const bs_tensor c0 = {c0_data, BS_F32, BS_CPU, 0, 2, {N, H}, {H, 1}};
  const bs_tensor y = {y_data, BS_F32, BS_CPU, 0, 3, {STEPS, N, H}, {N * H, H, 1}};
  bs_tensor h = c0, c = c0, gates = pre, cells = y, dpre = pre, dw = w, dc0 = c0;
  h.data = h_data, c.data = c_data, gates.data = gates_data, cells.data = cells_data;
  dpre.data = dpre_data, dw.data = dw_data, dc0.data = dc0_data;
  for (int i = 0; i < N * H; ++i) c0_data[i] = 1;

  static char memory[1 << 16];
  const bs_workspace workspace = {memory, sizeof memory};
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  EXPECT(bs_lstm_forward_workspace_size(&view, BS_F32, STEPS, N) <= sizeof memory);
  EXPECT(bs_lstm_backward_workspace_size(&view, BS_F32, STEPS, N) <= sizeof memory);
  EXPECT(bs_lstm_forward_workspace_size(NULL, BS_F32, STEPS, N) == 0);
  const bs_lstm_outputs outputs = {&y, &h, &c, &gates, &cells};
  EXPECT(bs_lstm_forward(&view, &pre, &w, NULL, &c0, lengths, &outputs, workspace, stream) == BS_OK);
  EXPECT(fabsf(c_data[0] - 0.125f) < 1e-6f && fabsf(c_data[H] - 0.5f) < 1e-6f);
  EXPECT(fabsf(h_data[0] - 0.5f * tanhf(0.125f)) < 1e-6f && y_data[(N + 1) * H] == 0);

  const bs_lstm_saved saved = {&w, NULL, &c0, lengths, &y, &gates, &cells};
  const bs_lstm_grads grads = {&dpre, &dw, NULL, &dc0};
  EXPECT(bs_lstm_backward(&view, &saved, NULL, NULL, &c0, 0, &grads, workspace, stream) == BS_OK);
  EXPECT(fabsf(dc0_data[0] - 0.125f) < 1e-6f && fabsf(dc0_data[H] - 0.5f) < 1e-6f);
  EXPECT_ERROR(bs_lstm_backward(&view, &saved, NULL, NULL, &c0, 2, &grads, workspace, stream), BS_INVALID_ARGUMENT,
               "accumulate is 2");
  EXPECT_ERROR(bs_lstm_forward(&view, &pre, &w, NULL, NULL, NULL, NULL, workspace, stream), BS_INVALID_ARGUMENT,
               "outputs is NULL");
  EXPECT_ERROR(bs_lstm_forward(&view, NULL, &w, NULL, NULL, NULL, &outputs, workspace, stream), BS_INVALID_ARGUMENT,
               "pre is not given");
  bs_layout_free(gate);
  bs_layout_free(layout);
}

/* Rows of two opposite numbers have a mean of 0 and are their own norm. */
static void test_layer_norm(void) {
  enum { N = 2, H = 4 };
  static float x_data[N * H] = {1, -1, 1, -1, -3, 3, 3, -3}, gain_data[H] = {1, 2, 1, 1}, shift_data[H] = {0, 0, 0, 5};
  static float y_data[N * H], stats_data[N * 2], dx_data[N * H];
  const bs_tensor x = {x_data, BS_F32, BS_CPU, 0, 3, {N, 1, H}, {H, H, 1}};
  const bs_tensor gain = {gain_data, BS_F32, BS_CPU, 0, 2, {1, H}, {H, 1}};
  const bs_tensor stats = {stats_data, BS_F32, BS_CPU, 0, 3, {N, 1, 2}, {2, 2, 1}};
  bs_tensor shift = gain, y = x, dx = x;
  shift.data = shift_data, y.data = y_data, dx.data = dx_data;
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  bs_layer_norm_inputs inputs = {&x, &gain, &shift, NULL, NULL, 1, 1e-12};
  EXPECT(bs_layer_norm_forward(&inputs, &y, &stats, stream) == BS_OK);
  EXPECT(fabsf(y_data[0] - 1) < 1e-6f && y_data[1] == 0 && fabsf(y_data[3] - 4) < 1e-6f);
  EXPECT(fabsf(y_data[5] - 2) < 1e-6f && fabsf(stats_data[3] - 1 / 3.0f) < 1e-6f);
  const bs_layer_norm_saved saved = {&x, &gain, &shift, NULL, &y, &stats, 1};
  bs_layer_norm_grads grads = {&dx, NULL, NULL, NULL, NULL};
  EXPECT(bs_layer_norm_backward(&saved, &y, &grads, stream) == BS_OK);
  EXPECT(fabsf(dx_data[0] + dx_data[1] + dx_data[2] + dx_data[3]) < 1e-5f);
  /* Nothing comes through where y is 0. */
  static float dy_data[N * H] = {1, 1, 1, 1, 1, 1, 1, 1}, dterm_data[N * H];
  bs_tensor dy = x, dterm = x;
  dy.data = dy_data, dterm.data = dterm_data;
  grads.term = &dterm;
  EXPECT(bs_layer_norm_backward(&saved, &dy, &grads, stream) == BS_OK);
  EXPECT(dterm_data[0] == 1 && dterm_data[1] == 0 && dterm_data[3] == 1 && dterm_data[4] == 0);
  inputs.relu = 2;
  EXPECT_ERROR(bs_layer_norm_forward(&inputs, &y, &stats, stream), BS_INVALID_ARGUMENT, "relu is 2");
  EXPECT_ERROR(bs_layer_norm_forward(NULL, &y, &stats, stream), BS_INVALID_ARGUMENT, "inputs is NULL");
  grads.x = NULL;
  EXPECT_ERROR(bs_layer_norm_backward(&saved, &y, &grads, stream), BS_INVALID_ARGUMENT, "dx is not given");
}

/* With W, gains and shifts of 0 each step halves c, whatever it is multiplied with or added to. */
static void test_deep_update(void) {
  enum { STEPS = 3, N = 2, H = 8, MATRICES = 3 };
  const bs_blocking blocking = {.block_size = 8};
  bs_layout *one = NULL, *four = NULL;
  bs_layout_view of_one, of_four;
  EXPECT(bs_layout_from_graph("diagonal(1)", 0, &blocking, &one) == BS_OK && bs_layout_stack(one, 4, &four) == BS_OK);
  EXPECT(bs_layout_get_view(one, &of_one) == BS_OK && bs_layout_get_view(four, &of_four) == BS_OK);
  static float zeros[4 * H * H], c0_data[N * H], y_data[STEPS * N * H], h_data[N * H], c_data[N * H];
  static float made[8][STEPS * N * H], dw_data[MATRICES][4 * H * H], dnorm_data[MATRICES][2][4 * H];
  const bs_tensor x = {zeros, BS_F32, BS_CPU, 0, 3, {STEPS, N, H}, {N * H, H, 1}};
  const bs_tensor state = {zeros, BS_F32, BS_CPU, 0, 2, {N, H}, {H, 1}};
  const bs_tensor w1 = {zeros, BS_F32, BS_CPU, 0, 3, {1, H, H}, {H * H, H, 1}};
  const bs_tensor w4 = {zeros, BS_F32, BS_CPU, 0, 3, {4, H, H}, {H * H, H, 1}};
  const bs_tensor norm1 = {zeros, BS_F32, BS_CPU, 0, 1, {H}, {1}}, norm4 = {zeros, BS_F32, BS_CPU, 0, 1, {4 * H}, {1}};
  const bs_deep_update_matrix square = {&of_one, &w1, &norm1, &norm1}, gates = {&of_four, &w4, &norm4, &norm4};
  const bs_deep_update_matrix matrices[MATRICES] = {square, square, gates};
  bs_tensor c0 = state, y = x, h = state, c = state;
  c0.data = c0_data, y.data = y_data, h.data = h_data, c.data = c_data;
  for (int i = 0; i < N * H; ++i) c0_data[i] = 1;
  int64_t lengths[N] = {3, 1};
  bs_deep_update_inputs inputs = {matrices, MATRICES, &x, &x, &state, &c0, lengths, 1e-6};

  static _Alignas(64) char saved_data[1 << 14], memory[1 << 16];
  const bs_workspace saved = {saved_data, sizeof saved_data}, workspace = {memory, sizeof memory};
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  EXPECT(bs_deep_update_saved_size(&inputs) > 0 && bs_deep_update_saved_size(&inputs) <= sizeof saved_data);
  EXPECT(bs_deep_update_forward_workspace_size(&inputs) <= sizeof memory);
  EXPECT(bs_deep_update_backward_workspace_size(&inputs) <= sizeof memory);
  EXPECT(bs_deep_update_saved_size(NULL) == 0);
  EXPECT(bs_deep_update_forward(&inputs, &y, &h, &c, saved, workspace, stream) == BS_OK);
  EXPECT(fabsf(c_data[0] - 0.125f) < 1e-6f && fabsf(c_data[H] - 0.5f) < 1e-6f);
  EXPECT(fabsf(h_data[0] - 0.5f * tanhf(0.125f)) < 1e-6f && y_data[(N + 1) * H] == 0);

  bs_tensor dfactor = x, dterm = x, dh0 = state, dc0 = state, dw[MATRICES], dgain[MATRICES], dshift[MATRICES];
  dfactor.data = made[0], dterm.data = made[1], dh0.data = made[2], dc0.data = made[3];
  bs_deep_update_matrix_grads of_matrices[MATRICES];
  for (int j = 0; j < MATRICES; ++j) {
    dw[j] = *matrices[j].w, dgain[j] = *matrices[j].gain, dshift[j] = *matrices[j].shift;
    dw[j].data = dw_data[j], dgain[j].data = dnorm_data[j][0], dshift[j].data = dnorm_data[j][1];
    of_matrices[j] = (bs_deep_update_matrix_grads){&dw[j], &dgain[j], &dshift[j]};
  }
  const bs_deep_update_grads grads = {of_matrices, &dfactor, &dterm, &dh0, &dc0};
  EXPECT(bs_deep_update_backward(&inputs, &y, saved, NULL, NULL, &c0, &grads, workspace, stream) == BS_OK);
  EXPECT(fabsf(made[3][0] - 0.125f) < 1e-6f && fabsf(made[3][H] - 0.5f) < 1e-6f);
  EXPECT_ERROR(bs_deep_update_backward(&inputs, &y, saved, NULL, NULL, &c0, NULL, workspace, stream),
               BS_INVALID_ARGUMENT, "grads is NULL");
  const bs_deep_update_grads no_matrices = {NULL, &dfactor, &dterm, &dh0, &dc0};
  EXPECT_ERROR(bs_deep_update_backward(&inputs, &y, saved, NULL, NULL, &c0, &no_matrices, workspace, stream),
               BS_INVALID_ARGUMENT, "gradients of matrices is NULL");
  EXPECT_ERROR(bs_deep_update_forward(NULL, &y, &h, &c, saved, workspace, stream), BS_INVALID_ARGUMENT,
               "inputs is NULL");
  lengths[1] = -1;
  EXPECT_ERROR(bs_deep_update_forward(&inputs, &y, &h, &c, saved, workspace, stream), BS_INVALID_ARGUMENT,
               "[deep_update_forward] lengths[1] is -1, needs 0 to 3");
  inputs.count = 65;
  EXPECT_ERROR(bs_deep_update_forward(&inputs, &y, &h, &c, saved, workspace, stream), BS_INVALID_ARGUMENT,
               "there are 65 matrices, needs 3 to 64");
  bs_layout_free(one);
  bs_layout_free(four);
}

/* With W and W_m of 0 the cell sees pre alone: 0 halves c at each step. */
static void test_multiplicative(void) {
  enum { STEPS = 3, N = 2, H = 8 };
  const bs_blocking blocking = {.block_size = 8};
  bs_layout *one = NULL, *four = NULL;
  bs_layout_view of_one, of_four;
  EXPECT(bs_layout_from_graph("diagonal(1)", 0, &blocking, &one) == BS_OK && bs_layout_stack(one, 4, &four) == BS_OK);
  EXPECT(bs_layout_get_view(one, &of_one) == BS_OK && bs_layout_get_view(four, &of_four) == BS_OK);
  static float zeros[4 * H * H], c0_data[N * H], y_data[STEPS * N * H], h_data[N * H], c_data[N * H];
  static float made[4][STEPS * N * 4 * H], dw_m_data[H * H], dw_data[4 * H * H];
  const bs_tensor factor = {zeros, BS_F32, BS_CPU, 0, 3, {STEPS, N, H}, {N * H, H, 1}};
  const bs_tensor pre = {zeros, BS_F32, BS_CPU, 0, 4, {STEPS, N, 4, H}, {N * 4 * H, 4 * H, H, 1}};
  const bs_tensor h0 = {zeros, BS_F32, BS_CPU, 0, 2, {N, H}, {H, 1}};
  const bs_tensor w_m = {zeros, BS_F32, BS_CPU, 0, 3, {1, H, H}, {H * H, H, 1}};
  const bs_tensor w = {zeros, BS_F32, BS_CPU, 0, 3, {4, H, H}, {H * H, H, 1}};
  bs_tensor c0 = h0, y = factor, h = h0, c = h0;
  c0.data = c0_data, y.data = y_data, h.data = h_data, c.data = c_data;
  for (int i = 0; i < N * H; ++i) c0_data[i] = 1;
  int64_t lengths[N] = {3, 1};
  const bs_multiplicative_inputs inputs = {&of_one, &of_four, &w_m, &w, &factor, &pre, &h0, &c0, lengths};

  static _Alignas(64) char saved_data[1 << 14], memory[1 << 16];
  const bs_workspace saved = {saved_data, sizeof saved_data}, workspace = {memory, sizeof memory};
  const bs_stream stream = {NULL, 1, BS_MATH_IEEE};
  EXPECT(bs_multiplicative_saved_size(&inputs) > 0 && bs_multiplicative_saved_size(&inputs) <= sizeof saved_data);
  EXPECT(bs_multiplicative_forward_workspace_size(&inputs) <= sizeof memory);
  EXPECT(bs_multiplicative_backward_workspace_size(&inputs) <= sizeof memory);
  EXPECT(bs_multiplicative_saved_size(NULL) == 0);
  EXPECT(bs_multiplicative_forward(&inputs, &y, &h, &c, saved, workspace, stream) == BS_OK);
  EXPECT(fabsf(c_data[0] - 0.125f) < 1e-6f && fabsf(c_data[H] - 0.5f) < 1e-6f);
  EXPECT(fabsf(h_data[0] - 0.5f * tanhf(0.125f)) < 1e-6f && y_data[(N + 1) * H] == 0);

  bs_tensor dfactor = factor, dpre = pre, dh0 = h0, dc0 = h0, dw_m = w_m, dw = w;
  dfactor.data = made[0], dpre.data = made[1], dh0.data = made[2], dc0.data = made[3];
  dw_m.data = dw_m_data, dw.data = dw_data;
  const bs_multiplicative_grads grads = {&dw_m, &dw, &dfactor, &dpre, &dh0, &dc0};
  EXPECT(bs_multiplicative_backward(&inputs, &y, saved, NULL, NULL, &c0, &grads, workspace, stream) == BS_OK);
  EXPECT(fabsf(made[3][0] - 0.125f) < 1e-6f && fabsf(made[3][H] - 0.5f) < 1e-6f);
  EXPECT_ERROR(bs_multiplicative_backward(&inputs, &y, saved, NULL, NULL, &c0, NULL, workspace, stream),
               BS_INVALID_ARGUMENT, "grads is NULL");
  EXPECT_ERROR(bs_multiplicative_forward(NULL, &y, &h, &c, saved, workspace, stream), BS_INVALID_ARGUMENT,
               "inputs is NULL");
  lengths[1] = 4;
  EXPECT_ERROR(bs_multiplicative_forward(&inputs, &y, &h, &c, saved, workspace, stream), BS_INVALID_ARGUMENT,
               "[multiplicative_forward] lengths[1] is 4, needs 0 to 3");
  bs_layout_free(one);
  bs_layout_free(four);
}

void test_recurrent(void) {
  test_lstm();
  test_layer_norm();
  test_deep_update();
  test_multiplicative();
}

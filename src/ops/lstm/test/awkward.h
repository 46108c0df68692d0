// Cases at the edges of what the LSTM op divides, for tests of every device.
#pragma once

#include <string_view>

namespace blocksparse::lstm {

inline constexpr std::string_view kAwkward[] = {
    // Nothing, or almost nothing, to do.
    "lstm:forward f32 t=0 n=3 b=8 random(4,4,0.5) h0 c0 keep final",
    "lstm:forward f32 t=0 n=3 b=8 random(4,4,0.5) final",
    "lstm:forward f32 t=3 n=0 b=8 random(4,4,0.5) h0 c0 keep final",
    "lstm:forward f32 t=1 n=1 b=8 diagonal(1)",
    "lstm:forward f64 t=4 n=5 b=16 random(3,3,0) h0 c0 keep final",
    "lstm:backward f32 t=0 n=3 b=8 random(4,4,0.5) h0 c0 final dh0 dc0 dw",
    "lstm:backward bf16 t=0 n=3 b=8 random(4,4,0.5) dh0 dc0 dw accumulate",
    "lstm:backward f32 t=3 n=0 b=8 random(4,4,0.5) final dh0 dc0 dw",
    "lstm:backward f64 t=3 n=4 b=8 random(3,3,0) h0 c0 final dh0 dc0 dw",
    "lstm:backward f32 t=1 n=1 b=8 diagonal(1) dw",
    // A handful of sequences, whose products have vectors along features.
    "lstm:forward f32 t=6 n=1 b=32 random(4,4,0.5) h0 c0 keep final",
    "lstm:forward bf16 t=5 n=2 b=8 random(6,6,0.4) h0 final",
    "lstm:forward f64 t=5 n=3 b=16 random(4,4,0.5) h0 c0 lengths final",
    "lstm:forward f16 t=5 n=4 b=64 random(2,2,1) c0 keep sorted final",
    "lstm:backward f32 t=5 n=1 b=8 random(6,6,0.4) h0 c0 final dh0 dc0 dw",
    "lstm:backward bf16 t=4 n=4 b=32 random(4,4,0.5) h0 c0 lengths final dh0 dc0 dw wide",
    "lstm:backward f64 t=5 n=3 b=16 random(4,4,0.5) h0 c0 sorted final dh0 dc0 dw",
    // Around the edges of vectors and groups.
    "lstm:forward f32 t=5 n=7 b=16 random(4,4,0.5) h0 c0 keep final",
    "lstm:forward f32 t=3 n=65 b=8 random(9,9,0.3) h0 c0 final",
    "lstm:forward f32 t=3 n=129 b=32 random(3,3,0.6) keep threads=2",
    "lstm:forward f64 t=3 n=33 b=128 random(2,2,1) h0 c0 keep final",
    "lstm:forward bf16 t=4 n=70 b=64 random(3,3,0.5) h0 c0 keep final threads=2",
    "lstm:forward f16 t=4 n=17 b=32 random(3,3,0.5) h0 c0 final",
    "lstm:backward f32 t=5 n=7 b=16 random(4,4,0.5) h0 c0 final dh0 dc0 dw",
    "lstm:backward f32 t=3 n=65 b=8 random(9,9,0.3) h0 c0 dh0 dc0 dw threads=2",
    "lstm:backward f64 t=3 n=33 b=128 random(2,2,1) c0 final dc0 dw accumulate",
    "lstm:backward bf16 t=4 n=70 b=64 random(3,3,0.5) h0 c0 final dh0 dc0 dw accumulate wide threads=2",
    "lstm:backward f16 t=3 n=17 b=32 random(3,3,0.5) h0 dh0 dw",
    // Lengths, in any order and with the longest first.
    "lstm:forward f32 t=7 n=70 b=8 random(5,5,0.5) h0 c0 lengths keep final",
    "lstm:forward f32 t=7 n=140 b=16 random(3,3,0.5) h0 c0 sorted keep final threads=2",
    "lstm:forward bf16 t=7 n=21 b=8 random(5,5,0.5) lengths final",
    "lstm:backward f32 t=7 n=70 b=8 random(5,5,0.5) h0 c0 lengths final dh0 dc0 dw",
    "lstm:backward f64 t=6 n=140 b=16 random(3,3,0.5) h0 c0 sorted final dh0 dc0 dw threads=2",
    "lstm:backward bf16 t=7 n=21 b=8 random(5,5,0.5) sorted final dh0 dc0 dw",
    // Hubs, gates of different layouts, weight gradients of more than one round.
    "lstm:forward f32 t=3 n=9 b=8 ba(60,4) h0 c0 keep final",
    "lstm:backward f32 t=3 n=9 b=8 ba(60,4) h0 c0 final dh0 dc0 dw threads=2",
    "lstm:forward f32 t=4 n=12 b=8 random(20,5,0.4) h0 c0 keep final",
    "lstm:backward f64 t=4 n=12 b=8 random(20,5,0.4) h0 c0 final dh0 dc0 dw",
    "lstm:backward bf16 t=40 n=30 b=8 random(4,4,0.5) h0 c0 final dh0 dc0 dw",
};

}  // namespace blocksparse::lstm

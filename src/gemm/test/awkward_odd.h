// Problems whose x (and dy) holds Inf and NaN, and whose W is NaN behind closed gates. These values must reach the
// outputs that depend on them, and no others.
#pragma once

namespace blocksparse::gemm {

inline constexpr const char* kAwkwardOdd[] = {
    // Closed gates.
    "linear:fprop f32 n=1 b=8 random(12,13,0.4) seed=1 gates odd=2",
    "linear:fprop bf16 n=3 b=16 random(9,8,0.5) seed=2 gates odd=3",
    "linear:fprop f64 n=5 b=32 random(7,6,0.5) seed=3 gates odd=3 bias",
    "linear:fprop f16 n=70 b=64 random(5,6,0.5) seed=4 gates odd=9 residual",
    "linear:fprop f32 n=200 b=128 random(4,4,0.6) seed=5 gates odd=20",
    "linear:dgrad bf16 n=1 b=128 random(4,4,0.6) seed=6 gates odd=1",
    "linear:dgrad f32 n=3 b=64 random(5,6,0.5) seed=7 gates odd=2",
    "linear:dgrad f16 n=5 b=32 random(7,6,0.5) seed=8 gates odd=3",
    "linear:dgrad f64 n=40 b=16 random(9,8,0.5) seed=9 gates odd=5",
    "linear:dgrad bf16 n=300 b=8 random(20,30,0.4) seed=10 gates odd=20 t",
    "linear:wgrad f32 n=1 b=8 random(12,13,0.4) seed=11 gates odd=2",
    "linear:wgrad bf16 n=3 b=16 random(9,8,0.5) seed=12 gates odd=2 dgates",
    "linear:wgrad f64 n=5 b=32 random(7,6,0.5) seed=13 gates odd=2",
    "linear:wgrad f16 n=5 b=64 random(5,6,0.5) seed=14 gates odd=2 dgates dw=f32",
    "linear:wgrad f32 n=60 b=128 random(4,4,0.6) seed=15 gates odd=3 dgates accumulate",
    "linear:wgrad bf16 n=300 b=32 random(7,9,0.4) seed=16 gates odd=4 pairs=2 dw=f32",
    // Missing blocks.
    "linear:fprop f32 n=130 b=8 random(20,30,0.2) seed=20 odd=20 x=first",
    "linear:fprop bf16 n=70 b=32 random(9,30,0.1) seed=21 odd=10",
    "linear:dgrad f16 n=257 b=64 random(6,7,0.3) seed=22 odd=20",
    "linear:wgrad bf16 n=1100 b=16 random(20,24,0.2) seed=23 odd=6 dw=f32",
    "linear:wgrad f16 n=700 b=64 random(6,7,0.3) seed=24 odd=4",
    // Missing blocks for which a kernel multiplies zeros: b = 8, and many blocks of 16 and 32.
    "linear:fprop bf16 n=600 b=8 random(40,40,0.3) seed=30 odd=60",
    "linear:fprop f16 n=700 b=8 random(40,50,0.05) seed=31 odd=60 bias act=relu",
    "linear:fprop bf16 n=530 b=16 random(30,20,0.6) seed=32 odd=40 residual y=first r=first",
    "linear:fprop f16 n=520 b=32 random(17,13,0.7) seed=33 odd=40 x=first",
    "linear:dgrad bf16 n=800 b=8 random(60,40,0.2) seed=34 odd=60 gates in=317 out=475",
    "linear:dgrad f16 n=640 b=16 random(20,31,0.5) seed=35 odd=40 gates y=first x=first",
    "linear:fprop bf16 n=1100 b=32 random(9,20,0.8) seed=36 odd=40 bias residual act=silu offset=1",
};

}  // namespace blocksparse::gemm

// Awkward problems of many tokens and small blocks, for kernels that walk lists and for kernels that cut dW into jobs.
#pragma once

namespace blocksparse::gemm {

inline constexpr const char* kAwkwardManyTokens[] = {
    // Lists of more than 32 and 64 blocks, odd ones; x that ends within its last 128 inputs, or within its last 64.
    "linear:fprop bf16 n=127 b=8 dense(40,91) seed=1 bias",
    "linear:dgrad f16 n=129 b=8 dense(93,37) seed=2 values=int",
    "linear:fprop f16 n=1 b=8 random(70,33,0.5) seed=3 act=relu",
    "linear:fprop bf16 n=128 b=16 random(45,70,0.7) seed=4 residual",
    "linear:fprop bf16 n=300 b=16 random(75,19,0.6) t seed=5 bias act=silu",
    "linear:fprop f16 n=385 b=32 random(9,70,0.7) seed=6 bias residual act=gelu",
    "linear:dgrad f16 n=64 b=32 dense(41,9) seed=7",
    "linear:fprop bf16 n=200 b=32 dense(12,1) seed=8",
    "linear:dgrad bf16 n=200 b=8 random(9,40,0.4) seed=9 values=int",
    // b = 8: two neighbouring blocks that are the last of 32 entries and the first of the next 32.
    "linear:fprop bf16 n=130 b=8 random(40,110,0.6) seed=25",
    "linear:dgrad f16 n=130 b=8 random(110,40,0.6) seed=26",
    "linear:dgrad f16 n=200 b=8 random(300,20,0.4) seed=27 values=int",
    // Rows without blocks, chunks without blocks, one row with all blocks.
    "linear:fprop bf16 n=200 b=16 random(20,20,0.2) seed=10 empty_row=3 empty_col=5 values=int",
    "linear:fprop f16 n=300 b=8 random(100,100,0.01) seed=11 bias",
    "linear:fprop bf16 n=140 b=32 random(40,30,0.02) t seed=12 residual",
    "linear:fprop bf16 n=130 b=8 random(60,200,0.01) seed=13 full_row=59 bias act=gelu",
    "linear:fprop f16 n=257 b=16 random(30,120,0.02) seed=14 full_row=0",
    "linear:dgrad f16 n=190 b=32 random(150,20,0.03) seed=15 full_col=19 values=int",
    // Outputs that end within a block, a tile, and 16 bytes; y and the residual by columns.
    "linear:fprop bf16 n=150 b=8 random(33,16,0.4) seed=16 out=261 bias residual",
    "linear:fprop f16 n=150 b=16 random(17,16,0.4) seed=17 out=265 bias act=relu",
    "linear:fprop bf16 n=150 b=32 random(8,9,0.5) t seed=18 in=269 residual act=silu",
    "linear:fprop bf16 n=260 b=16 random(17,16,0.4) seed=19 y=first residual r=first bias",
    "linear:fprop f16 n=260 b=8 random(40,16,0.3) seed=20 y=first",
    "linear:fprop f16 n=131 b=32 random(9,17,0.4) t seed=21 y=first residual pad=8",
    // Several tiles to a thread block.
    "linear:fprop bf16 n=9000 b=32 random(16,9,0.4) seed=22",
    "linear:fprop f16 n=18000 b=16 random(12,16,0.2) t seed=23 bias",
    "linear:fprop bf16 n=5000 b=8 random(130,12,0.2) seed=24 values=int",
    // Strips with far more blocks than others, and a strip with all blocks.
    "linear:wgrad f16 n=300 b=8 ba(400,6) seed=30 values=int dw=f32",
    "linear:wgrad bf16 n=200 b=16 ba(300,9) seed=31 accumulate dgates",
    "linear:wgrad f16 n=150 b=32 ba(130,4) seed=32 dw=f32",
    "linear:wgrad bf16 n=160 b=8 random(300,200,0) seed=33 full_row=150 dw=f32 values=int",
    "linear:wgrad f16 n=160 b=16 random(200,150,0) seed=34 full_col=77 dw=f32",
    // Hubs with as many columns as a card's thread blocks take in one or two rounds.
    "linear:wgrad bf16 n=140 b=8 ba(512,16) seed=38 dw=f32",
    "linear:wgrad f16 n=140 b=16 ba(256,16) seed=39 values=int",
    // Jobs that begin within 64 features, and end beyond the last.
    "linear:wgrad bf16 n=500 b=8 random(171,133,0.1) seed=35 out=1365 in=1059 dw=f32",
    "linear:wgrad f16 n=500 b=16 random(83,71,0.2) seed=36 out=1321 in=1130 dgates gates",
    "linear:wgrad bf16 n=500 b=32 random(43,51,0.2) seed=37 in=1603",
};

}  // namespace blocksparse::gemm

// Awkward problems of few to some hundred tokens, for tests: each also with other types.
#pragma once

namespace blocksparse::gemm {

inline constexpr const char* kAwkwardFewTokens[] = {
    // Slices of split rows.
    "linear:fprop bf16 n=33 b=8 dense(2,300) seed=1 bias act=gelu y=first",
    "linear:dgrad bf16 n=64 b=8 dense(300,2) seed=2 gates out=2397 in=13",
    "linear:fprop f16 n=8 b=8 ba(200,4) seed=3 bias residual act=relu values=int",
    "linear:dgrad f16 n=17 b=16 ba(200,4) seed=4",
    "linear:fprop bf16 n=64 b=16 dense(2,70) seed=5 out=27 in=1111 residual",
    "linear:fprop f16 n=32 b=32 dense(2,40) seed=6 bias",
    "linear:dgrad bf16 n=33 b=64 dense(34,1) seed=7 out=2170 gates",
    "linear:dgrad f16 n=1 b=128 dense(34,1) seed=8",
    // One row with all blocks: of 8 slices, or of more, beside rows that are empty or nearly so; rows of 2 and 4
    // slices.
    "linear:fprop bf16 n=33 b=32 random(40,300,0) seed=41 full_row=17 bias",
    "linear:fprop f16 n=8 b=32 random(9,600,0) seed=42 full_row=0 bias act=gelu",
    "linear:dgrad bf16 n=64 b=16 random(300,50,0.02) seed=43 full_col=49 empty_col=3 y=first",
    "linear:fprop f16 n=20 b=8 random(30,500,0.01) seed=44 full_row=4 empty_row=3 gates values=int",
    "linear:dgrad bf16 n=130 b=64 random(150,5,0.1) seed=45 full_col=2",
    "linear:fprop bf16 n=1 b=128 random(3,120,0.01) seed=46 full_row=2 out=300",
    "linear:fprop f16 n=70 b=128 random(5,40,0.2) seed=47 full_row=4 in=5061 y=first",
    "linear:dgrad bf16 n=16 b=32 ba(120,12) seed=48 x=first",
    "linear:fprop f16 n=33 b=32 ba(120,12) seed=49 bias residual act=relu",
    "linear:dgrad bf16 n=64 b=8 ba(300,20) seed=50 gates",
    "linear:fprop bf16 n=3 b=64 ba(90,20) seed=51 t",
    // Rows of which a warp has more than 32 patches.
    "linear:fprop bf16 n=32 b=8 dense(64,150) seed=9 gates",
    "linear:dgrad f16 n=64 b=16 dense(150,64) seed=10",
    "linear:fprop bf16 n=64 b=16 dense(64,150) seed=13 gates",
    "linear:fprop bf16 n=7 b=32 dense(64,150) seed=11 in=4799",
    "linear:dgrad f16 n=3 b=64 dense(80,64) seed=12 gates",
    // Groups of tokens.
    "linear:fprop bf16 n=65 b=32 random(6,7,0.5) seed=14",
    "linear:dgrad bf16 n=128 b=32 random(6,7,0.5) seed=15",
    "linear:fprop f16 n=129 b=32 random(9,5,0.5) seed=16 bias residual act=gelu",
    "linear:dgrad f16 n=192 b=64 random(4,5,0.5) seed=17 gates",
    "linear:fprop bf16 n=255 b=64 random(4,5,0.5) seed=18 gates y=first",
    "linear:fprop bf16 n=256 b=128 random(3,3,0.5) seed=19 out=379 bias",
    "linear:dgrad f16 n=256 b=32 dense(40,2) seed=20",
    "linear:fprop bf16 n=200 b=32 dense(2,40) seed=21 bias act=silu",
    "linear:fprop bf16 n=70 b=32 random(6,7,0.5) seed=22 in=200",
    "linear:fprop bf16 n=257 b=32 random(6,7,0.5) seed=23",
    // By the kernel `row_wgmma`: four rows together, with one list and with four, lists longer than its ring, rows that
    // are
    // cut, and edges of what boxes hold.
    "linear:fprop f16 n=256 b=32 dense(16,4) seed=24",
    "linear:fprop bf16 n=200 b=32 random(64,16,0.035) seed=25",
    "linear:fprop bf16 n=300 b=32 random(16,4,0.5) seed=25",
    "linear:fprop bf16 n=512 b=32 dense(48,12) seed=26",
    "linear:fprop bf16 n=100 b=32 random(64,16,0.9) seed=27 empty_row=3",
    "linear:fprop bf16 n=129 b=32 random(16,4,0.5) seed=28 bias act=relu",
    "linear:fprop f16 n=200 b=32 ba(200,4) seed=29",
    "linear:dgrad bf16 n=300 b=32 ba(200,4) seed=30",
    "linear:fprop bf16 n=129 b=32 random(40,300,0.002) seed=36 full_row=17",
    "linear:dgrad f16 n=130 b=32 ba(90,10) seed=37",
    "linear:fprop bf16 n=70 b=32 ba(150,12) seed=38 bias act=gelu",
    "linear:fprop f16 n=260 b=32 random(20,300,0.02) seed=39 full_row=3 empty_row=2 y=first out=637",
    "linear:dgrad f16 n=128 b=32 random(9,5,0.5) seed=31 t",
    "linear:fprop bf16 n=130 b=32 random(6,7,0.5) seed=32 out=187 y=first",
    "linear:fprop f16 n=150 b=32 random(6,7,0.5) seed=33 out=184 pad=8",
    "linear:fprop bf16 n=70 b=32 random(6,7,0) seed=34",
    "linear:fprop bf16 n=1 b=32 dense(8,70) seed=35 residual",
};

}  // namespace blocksparse::gemm

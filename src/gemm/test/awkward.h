// Cases at the edges of what the linear op divides, for tests of every device.
#pragma once

#include <string_view>

namespace blocksparse::gemm {

// Every instruction set that the CPU runs and every CUDA kernel that can do a case runs it.
inline constexpr std::string_view kAwkward[] = {
    // Nothing, or almost nothing, to do.
    "linear:fprop f32 n=0 b=8 random(4,4,0.5)",
    "linear:dgrad bf16 n=0 b=16 random(4,4,0.5)",
    "linear:wgrad f32 n=0 b=8 random(4,4,0.5) dgates",
    "linear:wgrad f32 n=0 b=8 random(4,4,0.5) accumulate dgates",
    "linear:wgrad f64 n=3 b=8 random(4,4,0.5) pairs=0",
    "linear:fprop f32 n=5 b=8 random(4,4,0) bias",
    "linear:fprop f32 n=1 b=8 diagonal(1)",
    "linear:fprop f64 n=1 b=128 diagonal(1) out=1 in=1 bias",
    "linear:dgrad f32 n=1 b=64 diagonal(1) out=3 in=2 x=first y=first",
    "linear:wgrad f32 n=1 b=32 diagonal(1) out=25 in=17",
    // Tokens around the edges of tiles and groups.
    "linear:fprop f32 n=1 b=32 random(6,9,0.3) seed=1",
    "linear:fprop f32 n=7 b=8 random(16,16,0.3) seed=2 x=first",
    "linear:fprop f32 n=31 b=16 random(9,7,0.4) seed=3 y=first",
    "linear:fprop f32 n=33 b=64 random(5,6,0.4) seed=4 x=first y=first",
    "linear:dgrad f32 n=63 b=8 random(16,12,0.3) seed=5 x=first",
    "linear:dgrad f32 n=65 b=128 random(3,4,0.5) seed=6",
    "linear:dgrad f64 n=129 b=16 random(7,8,0.4) seed=7 y=first",
    "linear:wgrad f32 n=7 b=8 random(16,16,0.3) seed=8",
    "linear:wgrad f32 n=33 b=16 random(8,8,0.3) seed=9 x=first",
    "linear:wgrad f64 n=65 b=64 random(4,4,0.5) seed=10 y=first",
    "linear:wgrad f32 n=129 b=128 random(3,3,0.6) seed=11 x=first y=first",
    // Inputs that many outputs use: x is packed.
    "linear:fprop f32 n=67 b=8 dense(42,9) seed=90 x=first y=first",
    "linear:dgrad f32 n=100 b=32 dense(4,11) seed=91 in=347 x=first threads=2",
    "linear:fprop f32 n=150 b=16 dense(6,9) seed=92 out=90 in=139 bias threads=2",
    "linear:dgrad f32 n=1100 b=32 ba(40,3) seed=93 pad=3 offset=1 threads=2",
    "linear:fprop f32 n=16 b=16 dense(5,4) seed=94 in=61",
    // A handful of tokens: vectors run along features.
    "linear:fprop f32 n=1 b=8 random(16,16,0.3) seed=50 bias act=relu",
    "linear:fprop f32 n=2 b=16 random(9,7,0.4) seed=51 out=140 in=99 gates",
    "linear:fprop bf16 n=3 b=32 random(6,6,0.4) seed=52 bias residual",
    "linear:fprop f16 n=4 b=64 random(4,4,0.5) seed=53 y=first residual r=first in=251",
    "linear:fprop f64 n=4 b=128 random(3,3,0.5) seed=54 values=int gates",
    "linear:fprop f32 n=1 b=8 dense(2,300) seed=55 threads=2",
    "linear:dgrad f32 n=1 b=8 random(16,16,0.3) seed=56 gates",
    "linear:dgrad f32 n=2 b=16 random(9,7,0.4) seed=57 out=139 in=97",
    "linear:dgrad bf16 n=3 b=32 random(6,6,0.4) seed=58 values=int",
    "linear:dgrad f16 n=4 b=64 random(4,4,0.5) seed=59 out=245",
    "linear:dgrad f64 n=1 b=128 ba(40,3) seed=70 threads=2",
    "linear:fprop f32 n=1 b=64 random(5,4,0.6) seed=95 bias",
    "linear:dgrad f32 n=1 b=16 random(9,7,0.4) seed=96",
    // More tokens than a round.
    "linear:fprop f32 n=1100 b=8 random(6,6,0.5) seed=12",
    "linear:fprop bf16 n=1030 b=32 random(3,3,0.6) seed=13 x=first residual act=relu",
    "linear:wgrad f32 n=1100 b=8 random(6,6,0.5) seed=14 dgates gates",
    "linear:wgrad bf16 n=1100 b=16 random(4,4,0.5) seed=15 dgates gates accumulate",
    "linear:wgrad f16 n=600 b=8 random(4,4,0.5) seed=16 pairs=3",
    // Ragged edges, empty rows and columns; everything that must not be read is poisoned.
    "linear:fprop f32 n=9 b=32 random(4,5,0.6) seed=20 out=100 in=130 pad=3 offset=1",
    "linear:fprop f16 n=17 b=16 random(4,5,0.6) seed=21 out=49 in=65 x=first y=first pad=5",
    "linear:dgrad bf16 n=17 b=64 random(3,3,0.7) seed=22 out=129 in=191 pad=1 offset=3 empty_col=0",
    "linear:fprop bf16 n=7 b=32 random(4,4,0.5) seed=23 empty_row=2 bias act=gelu",
    "linear:wgrad f64 n=33 b=16 random(8,8,0.2) seed=24 in=125 out=115",
    "linear:wgrad f32 n=33 b=8 random(8,8,0.4) seed=25 in=57 out=63 dgates gates pad=2 offset=1 accumulate",
    "linear:wgrad bf16 n=20 b=128 random(2,2,1) seed=26 in=129 out=255 dw=f32 dgates",
    // Hubs: rows that are cut into slices.
    "linear:fprop f32 n=40 b=8 ba(200,4) seed=30 bias act=silu",
    "linear:fprop bf16 n=70 b=8 dense(2,300) seed=31 bias act=gelu y=first",
    "linear:dgrad f16 n=129 b=16 ba(64,4) seed=32",
    "linear:dgrad f32 n=33 b=8 dense(300,2) seed=33 gates threads=2",
    "linear:wgrad f32 n=64 b=8 ba(200,4) seed=34 threads=2",
    // Epilogue, gates, orders, transposed views, several pairs.
    "linear:fprop f64 n=19 b=8 random(6,6,0.5) seed=40 bias residual act=gelu",
    "linear:fprop f32 n=50 b=16 random(6,6,0.5) seed=41 bias residual r=first act=silu gates",
    "linear:fprop f32 n=50 b=16 random(6,6,0.5) seed=42 residual y=first act=relu gates x=first",
    "linear:fprop bf16 n=50 b=64 random(3,3,0.5) seed=43 bias residual y=first r=first act=gelu gates",
    "linear:fprop f32 n=37 b=32 random(4,6,0.5) seed=44 t bias",
    "linear:dgrad f32 n=37 b=32 random(4,6,0.5) seed=45 t gates",
    "linear:wgrad f32 n=37 b=32 random(4,6,0.5) seed=46 t dgates gates",
    "linear:wgrad f32 n=40 b=32 random(4,6,0.5) seed=47 pairs=8 accumulate",
    "linear:wgrad bf16 n=40 b=16 random(4,6,0.5) seed=48 pairs=5 dw=f32 x=first",
    "linear:wgrad f16 n=40 b=64 random(3,3,0.5) seed=49 pairs=2 gates threads=2",
    // wgrad of so few blocks that x and dy are read in place; with odd strides; and with just too many tokens for it.
    "linear:wgrad f32 n=64 b=32 random(16,16,0.03) seed=55",
    "linear:wgrad f32 n=37 b=8 random(20,9,0.06) seed=56 gates dgates accumulate pad=3 offset=1",
    "linear:wgrad f64 n=5 b=16 random(9,16,0.06) seed=57 t dgates threads=2",
    "linear:wgrad f32 n=65 b=64 random(8,8,0.06) seed=58 gates",
    "linear:wgrad f32 n=200 b=16 random(9,8,0.4) seed=67 gates dgates accumulate",
    // Features-last with blocks of some vectors, no gates: vectors along outputs on the CPU.
    "linear:fprop f32 n=16 b=32 random(5,6,0.5) seed=71 out=150 in=181 pad=3 offset=1",
    "linear:fprop f32 n=75 b=64 random(6,5,0.5) seed=72 bias residual act=gelu empty_row=2",
    "linear:fprop f32 n=150 b=128 random(4,4,0.6) seed=73 in=500 out=511",
    "linear:dgrad f32 n=131 b=128 random(3,4,0.6) seed=74 in=400 out=300 pad=1 empty_col=1",
    "linear:dgrad f32 n=29 b=64 random(7,6,0.4) seed=75 t",
    "linear:dgrad f32 n=300 b=32 ba(60,4) seed=76 threads=2",
    "linear:fprop f32 n=140 b=16 dense(2,80) seed=77 bias act=relu threads=2",
    "linear:fprop bf16 n=75 b=32 random(6,6,0.5) seed=78 out=170 in=190 bias act=silu",
    "linear:dgrad bf16 n=131 b=64 random(5,6,0.5) seed=79 pad=2 offset=1",
    "linear:dgrad bf16 n=40 b=128 ba(40,2) seed=80 threads=2",
    "linear:fprop bf16 n=33 b=32 random(5,5,0.5) seed=81 in=159",
    // wgrad whose features-first dy is read in place, with blocks of x that nobody reads.
    "linear:wgrad f32 n=100 b=64 random(6,9,0.08) seed=82 x=first y=first dgates gates",
    "linear:wgrad f32 n=1100 b=32 random(5,7,0.2) seed=83 x=first y=first in=213 accumulate",
    "linear:wgrad f64 n=37 b=16 random(9,9,0.1) seed=84 y=first pad=3 offset=1",
    "linear:wgrad f32 n=70 b=32 random(5,7,0.2) seed=85 x=first y=first out=150",
    // Several rounds of tokens: a residual in another order than y; and exactly as many tokens as whole rounds have.
    "linear:fprop f32 n=1100 b=8 random(6,6,0.5) seed=100 bias residual r=first",
    "linear:fprop bf16 n=2100 b=16 random(5,4,0.5) seed=103 residual y=first act=gelu",
    "linear:fprop f64 n=1030 b=32 random(3,3,0.6) seed=104 residual x=first y=first r=first pad=3 rpad=8",
    "linear:wgrad bf16 n=2048 b=16 random(4,4,0.5) seed=101",
    "linear:wgrad f16 n=1024 b=8 random(6,5,0.5) seed=105 accumulate dgates gates",
    // y and the residual with rows of different lengths.
    "linear:fprop f32 n=37 b=16 random(5,4,0.5) seed=102 y=first residual r=first pad=3 rpad=7",
    "linear:fprop bf16 n=40 b=8 random(9,8,0.4) seed=106 residual pad=8 rpad=1 act=relu",
    // Small whole numbers: sums are exact, so every bit must agree.
    "linear:fprop f32 n=40 b=8 random(12,12,0.4) seed=60 values=int bias gates",
    "linear:fprop bf16 n=40 b=8 random(4,4,0.4) seed=61 values=int residual act=relu",
    "linear:fprop f16 n=40 b=32 random(4,4,0.5) seed=62 values=int bias x=first y=first",
    "linear:dgrad f32 n=40 b=64 random(4,4,0.5) seed=63 values=int gates",
    "linear:dgrad f64 n=40 b=128 random(3,3,0.5) seed=64 values=int",
    // The limits of how a card divides work: tiles of 64 tokens, 16 tiles (then long rows are walked as a whole), the
    // terms of a launch.
    "linear:fprop bf16 n=64 b=128 random(3,3,0.6) seed=50 gates",
    "linear:dgrad f16 n=64 b=128 random(3,3,0.6) seed=51 gates x=first",
    "linear:fprop f32 n=1030 b=8 dense(3,150) seed=52 bias act=silu",
    "linear:dgrad bf16 n=1040 b=8 ba(120,4) seed=53",
    "linear:dgrad bf16 n=100 b=8 dense(150,3) seed=54 y=first gates",
    "linear:wgrad bf16 n=3 b=16 random(4,4,0.5) seed=55 pairs=150 dgates",
    "linear:wgrad f32 n=2 b=8 random(4,4,0.5) seed=56 pairs=131 accumulate dgates gates x=first",
    "linear:wgrad f16 n=80 b=128 random(3,3,0.6) seed=57 dgates gates accumulate x=first y=first",
    "linear:wgrad f64 n=70 b=128 random(2,2,1) seed=58 in=200 out=150",
    "linear:wgrad bf16 n=70 b=8 random(40,3,0.5) seed=59 dw=f32 dgates",
    "linear:wgrad f32 n=100 b=16 random(6,6,0.4) seed=65 values=int dgates gates accumulate pairs=3",
    "linear:wgrad f16 n=20 b=32 random(6,6,0.4) seed=66 values=int dgates",
};

}  // namespace blocksparse::gemm

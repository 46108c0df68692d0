// How each kind of CPU does a problem: whole plans, as blocksparse-bench prints them.
#include <gtest/gtest.h>

#include <string_view>

#include "gemm/test/machines.h"

namespace blocksparse::gemm {
namespace {

struct PlanLine {
  Cpu cpu;
  std::string_view problem, plan;
};

constexpr PlanLine kLines[] = {
    {kZen3, "linear:fprop f32 n=1 b=32 random(32,0.10)", "few_tokens x=in_place threads=1 workspace=192"},
    {kXeon, "linear:fprop f32 n=1 b=32 random(32,0.10)", "few_tokens x=in_place large_unasked threads=1 workspace=192"},
    {kXeonAmx, "linear:fprop bf16 n=1 b=32 random(32,0.10)",
     "few_tokens x=in_place large_unasked threads=1 workspace=192"},
    {kXeonAmx, "linear:fprop bf16 n=4 b=32 random(32,0.10)",
     "tiles x=packed panel=16 threads=1 workspace=65728 round=16 group=64 by_group"},
    {kZen3, "linear:fprop f32 n=4 b=32 random(32,0.10)", "few_tokens x=in_place threads=1 workspace=192"},
    {kZen3, "linear:fprop f32 n=4 b=32 random(32,0.10) x=first y=first",
     "tokens_as_vectors x=in_place threads=1 workspace=65728 round=16 group=64 by_group"},
    {kZen3, "linear:fprop f32 n=64 b=8 random(128,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kZen3, "linear:fprop f32 n=64 b=16 random(64,0.10)",
     "along_outputs x=packed panel=64 threads=1 workspace=262336 round=64 group=128 by_group"},
    {kZen3, "linear:fprop f32 n=64 b=32 random(32,0.10)",
     "along_outputs x=in_place threads=1 workspace=192 round=64 group=128 by_group"},
    {kZen3, "linear:fprop f32 n=64 b=32 random(32,0.50)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kZen3, "linear:dgrad f32 n=64 b=32 random(32,0.50)",
     "along_outputs x=in_place threads=1 workspace=192 round=64 group=128 by_group"},
    {kZen3, "linear:fprop f32 n=64 b=32 random(32,0.50) x=first y=first",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=262336 round=64 group=64 by_group"},
    {kZen3, "linear:fprop f32 n=64 b=32 random(32,0.10) x=first y=first",
     "tokens_as_vectors x=in_place threads=1 workspace=65728 round=64 group=64 by_group"},
    {kZen3, "linear:fprop f32 n=512 b=32 random(32,0.10) x=first y=first",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=2097344 round=512 group=64 by_group"},
    {kZen3, "linear:fprop bf16 n=64 b=32 random(32,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=262336 round=64 group=64 by_group"},
    {kZen3, "linear:fprop f32 n=512 b=32 random(32,0.10) threads=2",
     "along_outputs x=packed panel=512 threads=2 workspace=2097344 round=512 group=128 by_group"},
    {kZen5, "linear:fprop f32 n=64 b=16 random(64,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kXeon, "linear:fprop f32 n=64 b=16 random(64,0.10)",
     "along_outputs x=packed panel=64 threads=1 workspace=262336 round=64 group=128 by_group"},
    {kZen5, "linear:dgrad f32 n=64 b=8 random(128,0.10)",
     "tokens_as_vectors x=packed panel=64 asks_again threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kXeon, "linear:dgrad f32 n=64 b=8 random(128,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kZen5, "linear:fprop f32 n=512 b=32 random(32,0.10)",
     "along_outputs x=in_place threads=1 workspace=192 round=512 group=128 by_group"},
    {kZen5, "linear:dgrad f32 n=64 b=32 random(128,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=2097344 round=64 group=64 by_group staged=64"},
    {kXeon, "linear:dgrad f32 n=64 b=32 random(128,0.10)",
     "along_outputs x=packed panel=64 threads=1 workspace=1048768 round=64 group=64 by_group"},
    {kZen5, "linear:fprop bf16 n=64 b=32 random(32,0.10)",
     "along_outputs x=in_place threads=1 workspace=192 round=64 group=128 by_group"},
    {kZen5, "linear:fprop f16 n=64 b=32 random(32,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=262336 round=64 group=64 by_group"},
    {kZen5, "linear:fprop f64 n=64 b=32 random(32,0.10)",
     "tokens_as_vectors x=packed panel=32 threads=1 workspace=524480 round=64 group=32 by_group"},
    {kZen5, "linear:fprop f32 n=64 b=32 random(32,0.10) gates",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kZen5, "linear:fprop f32 n=64 b=8 random(128,0.10) threads=2",
     "tokens_as_vectors x=packed panel=64 threads=2 workspace=524480 round=64 group=32 by_group staged=64"},
    {kZen5, "linear:fprop f32 n=512 b=8 random(128,0.10) threads=2",
     "tokens_as_vectors x=packed panel=512 threads=2 workspace=4194496 round=512 group=64 by_group staged=512"},
    {kZen5, "linear:fprop f32 n=1056 b=8 random(128,0.10) threads=2",
     "tokens_as_vectors x=packed panel=1024 threads=2 workspace=8388800 round=1024 group=64 by_group staged=1024 last: "
     "group=64 by_piece staged=64"},
    // Threads do a group each only where there is room for the sums of all tokens of a round.
    {kZen5, "linear:fprop f32 n=512 b=8 random(1024,64,0.05) threads=2",
     "tokens_as_vectors x=packed panel=512 threads=2 workspace=9437376 round=512 group=64 by_piece staged=64"},
    {kZen5, "linear:fprop f32 n=64 b=8 random(512,0.10) threads=16",
     "tokens_as_vectors x=packed panel=64 threads=16 workspace=2097344 round=64 group=64 by_piece staged=64"},
    {kXeonAmx, "linear:fprop bf16 n=64 b=32 random(32,0.10)",
     "tiles x=packed panel=64 threads=1 workspace=262336 round=64 group=64 by_group"},
    {kXeonAmx, "linear:dgrad bf16 n=512 b=64 random(16,0.50)",
     "tiles x=packed panel=128 threads=1 workspace=2097344 round=512 group=128 by_group"},
    {kXeonAmx, "linear:dgrad bf16 n=512 b=64 random(16,0.50) threads=16",
     "tiles x=packed panel=512 threads=16 workspace=2097344 round=512 group=128 by_piece"},
    {kXeonAmx, "linear:fprop f32 n=64 b=32 random(32,0.10)",
     "along_outputs x=in_place threads=1 workspace=192 round=64 group=128 by_group"},
    {kArm, "linear:fprop f32 n=64 b=32 random(32,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kArm, "linear:fprop f32 n=64 b=32 random(32,0.10) x=first y=first",
     "tokens_as_vectors x=in_place threads=1 workspace=65728 round=64 group=64 by_group"},
    {kArmBf16, "linear:dgrad bf16 n=64 b=8 random(128,0.10)",
     "tokens_as_vectors x=packed panel=64 threads=1 workspace=524480 round=64 group=64 by_group staged=64"},
    {kArmBf16, "linear:fprop bf16 n=512 b=64 random(16,0.50) threads=64",
     "tokens_as_vectors x=packed panel=512 threads=64 workspace=2097344 round=512 group=64 by_piece"},
    {kZen5, "linear:fprop f32 n=64 b=32 ba(128,4)",
     "along_outputs x=in_place threads=1 workspace=32960 round=64 group=64 by_group"},
    {kZen3, "linear:wgrad f32 n=64 b=32 random(32,0.02)", "in_place threads=1 workspace=128 round=64 task_blocks=20"},
    {kZen3, "linear:wgrad f32 n=64 b=32 random(32,0.10)", "packed threads=1 workspace=524416 round=64 task_blocks=102"},
    {kZen3, "linear:wgrad f32 n=512 b=32 random(32,0.10)",
     "packed threads=1 workspace=524416 round=64 task_blocks=102"},
    {kZen3, "linear:wgrad f32 n=512 b=8 random(128,0.10)",
     "packed threads=1 workspace=4194432 round=512 task_blocks=1638"},
    {kZen5, "linear:wgrad f32 n=512 b=32 random(32,0.10)", "in_place threads=1 workspace=128 round=64 task_blocks=102"},
    {kXeon, "linear:wgrad f32 n=512 b=32 random(32,0.10)",
     "in_place copies_dy threads=1 workspace=128 round=64 task_blocks=102"},
    {kZen5, "linear:wgrad f32 n=512 b=32 random(128,0.10)",
     "packed threads=1 workspace=8388736 round=256 task_blocks=1638"},
    {kZen5, "linear:wgrad f32 n=64 b=32 random(32,0.10) x=first y=first",
     "dy_in_place threads=1 workspace=524416 round=64 task_blocks=102"},
    {kZen5, "linear:wgrad f32 n=64 b=32 random(32,0.10) x=first y=first out=1000",
     "packed threads=1 workspace=524416 round=64 task_blocks=102"},
    {kZen5, "linear:wgrad f32 n=64 b=32 random(32,0.10) pairs=8",
     "packed threads=1 workspace=4194432 round=512 task_blocks=102"},
    {kZen5, "linear:wgrad bf16 n=64 b=32 random(32,0.10)",
     "packed threads=1 workspace=524416 round=64 task_blocks=102"},
    {kXeonAmx, "linear:wgrad bf16 n=4096 b=32 random(32,0.10) threads=16",
     "packed wide_sums threads=16 workspace=8806528 round=1024 task_blocks=16"},
    {kXeonAmx, "linear:wgrad bf16 n=4096 b=32 random(32,0.10) dw=f32 threads=16",
     "packed threads=16 workspace=8388736 round=1024 task_blocks=16"},
    {kArm, "linear:wgrad f32 n=64 b=32 random(32,0.02)", "in_place threads=1 workspace=128 round=64 task_blocks=20"},
};

TEST(Select, PlansOfLines) {
  for (const PlanLine& line : kLines) {
    EXPECT_EQ(plan_on(line.cpu, line.problem), line.plan)
        << line.problem << " on " << name_of(isas_of(line.cpu).front());
  }
}

}  // namespace
}  // namespace blocksparse::gemm

// Functions of the special function unit: accurate to about 22 bits, without branches, denormals count as 0.
#pragma once

namespace blocksparse::ptx {

__device__ inline float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace blocksparse::ptx

// Advanced SIMD, which every 64-bit Arm CPU has: vectors of 16 bytes.
#pragma once

#define BS_VECTOR_BYTES 16
#include "cpu/simd.h"

// Vectors of 16 bytes in the machine's baseline: SSE2 on x86-64.
#pragma once

#define BS_VECTOR_BYTES 16
#include "cpu/simd.h"

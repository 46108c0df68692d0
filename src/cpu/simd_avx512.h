// AVX-512 F, BW, DQ, VL: vectors of 64 bytes.
#pragma once

#define BS_VECTOR_BYTES 64
#include "cpu/simd.h"

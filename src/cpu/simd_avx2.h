// AVX2 and FMA: vectors of 32 bytes.
#pragma once

#define BS_VECTOR_BYTES 32
#include "cpu/simd.h"

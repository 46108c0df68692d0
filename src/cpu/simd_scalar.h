// SSE2, or whatever 16-byte vectors the baseline of the machine has: vectors of 16 bytes.
#pragma once

#define BS_VECTOR_BYTES 16
#include "cpu/simd.h"

// blocksparse: neural-network layers whose weights are zero outside a chosen set of blocks. This header is all of it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "blocksparse/bias.h"
#include "blocksparse/conv.h"
#include "blocksparse/deep_update.h"
#include "blocksparse/device_index.h"
#include "blocksparse/dtype.h"
#include "blocksparse/export.h"
#include "blocksparse/glu.h"
#include "blocksparse/graphs.h"
#include "blocksparse/layout.h"
#include "blocksparse/lstm.h"
#include "blocksparse/multiplicative.h"
#include "blocksparse/norm.h"
#include "blocksparse/ops.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

BS_EXPORT std::string_view version();  // "major.minor.patch"

// Instruction sets that have kernels and that this CPU runs, best first: "amx", "avx512_bf16", "avx512", "avx2",
// "neon_bf16", "neon", "scalar". The last is "reference": the plain double loops that tests compare with.
BS_EXPORT std::vector<std::string> cpu_isas();

// The instruction set that ops use: the best, unless the environment variable BLOCKSPARSE_ISA or set_cpu_isa() names
// another. A name that is unknown, or that this CPU does not run, is refused. If the environment variable holds such a
// name, every op on the CPU answers with that message.
BS_EXPORT Result<std::string> cpu_isa();
[[nodiscard]] BS_EXPORT Status set_cpu_isa(std::string_view name);  // "" for the best again

// ok if this build holds CUDA kernels and this machine can run them. Otherwise the message says what is missing.
[[nodiscard]] BS_EXPORT Status cuda_status();

// The CUDA kernels of this build, best first. An op chooses one for each problem, unless the environment variable
// BLOCKSPARSE_CUDA_KERNEL or set_cuda_kernel() names one. The op then answers `unsupported` for a problem that this
// kernel cannot do.
BS_EXPORT std::vector<std::string> cuda_kernels();
// "" lets ops choose again. Workspace sizes change with the kernel: ask for them anew. No other thread may be in an op.
[[nodiscard]] BS_EXPORT Status set_cuda_kernel(std::string_view name);

// Loads all kernels onto a device. The first op on a device does so too. Call this before a first op that is captured
// in a graph.
[[nodiscard]] BS_EXPORT Status cuda_prepare(Device device);

// Ops that this thread calls from now on launch as if their card had `count` multiprocessors less, at least one.
// Kernels of another stream then run beside them, such as NCCL's: most kernels here fill every multiprocessor until
// they end, so that nothing begins meanwhile. 0, which threads begin with, takes them all. Workspace sizes change: ask
// for them anew.
[[nodiscard]] BS_EXPORT Status cuda_leave_multiprocessors(int32_t count);

// The device that is current in CUDA's runtime on the calling thread.
[[nodiscard]] BS_EXPORT Result<Device> cuda_current_device();

}  // namespace blocksparse

// How the file of one instruction set, cpu_<isa>.cc, reads a list of kernels (gemm/cpu/kernels.inc,
// cpu/kernels_of_ops.inc). The file defines BS_KERNEL_<isa>(dtype, ...) for its own rows, includes this file, then the
// list. Rows of other instruction sets expand to nothing. There is no include guard, because each inclusion expands
// anew.
#if !defined(BS_KERNEL_scalar)
#define BS_KERNEL_scalar(...)
#endif
#if !defined(BS_KERNEL_avx2)
#define BS_KERNEL_avx2(...)
#endif
#if !defined(BS_KERNEL_avx512)
#define BS_KERNEL_avx512(...)
#endif
#if !defined(BS_KERNEL_avx512_bf16)
#define BS_KERNEL_avx512_bf16(...)
#endif
#if !defined(BS_KERNEL_amx)
#define BS_KERNEL_amx(...)
#endif
#if !defined(BS_KERNEL_neon)
#define BS_KERNEL_neon(...)
#endif
#if !defined(BS_KERNEL_neon_bf16)
#define BS_KERNEL_neon_bf16(...)
#endif

#define BS_KERNEL(isa, ...) BS_KERNEL_##isa(__VA_ARGS__)

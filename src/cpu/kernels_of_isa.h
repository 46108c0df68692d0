// How the file of one instruction set, cpu_<isa>.cc, reads a list of kernels (gemm/cpu/kernels.inc,
// cpu/kernels_of_ops.inc): it defines BS_KERNEL_<isa>(dtype, ...) for its own rows, includes this file, then the
// list; rows of others expand to nothing. No include guard: it is an expansion.
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

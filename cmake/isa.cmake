# One source file for each instruction set, src/<folder>/cpu/cpu_<isa>.cc, with its own flags; the rest of the library is
# compiled for the plainest machine, and picks at run time.

set(BLOCKSPARSE_ISAS scalar)
set(BLOCKSPARSE_FLAGS_scalar "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND BLOCKSPARSE_ISAS avx2 avx512 avx512_bf16 amx)
  # Where the inner loop of wgrad begins decides over up to 14 % of it on Zen 3 (b = 8, 50 %: 997 us to 863).
  set(BLOCKSPARSE_FLAGS_avx2 -mavx2 -mfma -falign-loops=64)
  set(BLOCKSPARSE_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)
  set(BLOCKSPARSE_FLAGS_avx512_bf16 ${BLOCKSPARSE_FLAGS_avx512} -mavx512bf16)
  set(BLOCKSPARSE_FLAGS_amx ${BLOCKSPARSE_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
  if(BLOCKSPARSE_EMULATE)
    foreach(isa avx512 avx512_bf16 amx)
      set(BLOCKSPARSE_FLAGS_${isa} ${BLOCKSPARSE_FLAGS_avx2} -DBLOCKSPARSE_EMULATE -Wno-psabi)
    endforeach()
    set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cpu/isa.cc PROPERTIES
      COMPILE_DEFINITIONS BLOCKSPARSE_EMULATE)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  list(APPEND BLOCKSPARSE_ISAS neon neon_bf16)
  # Scheduling before registers are allocated moves the loads of many rows to the front: 131 spills in 8 rows of the
  # inner loop of GCC 12, none without.
  set(BLOCKSPARSE_FLAGS_neon $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
  set(BLOCKSPARSE_FLAGS_neon_bf16 ${BLOCKSPARSE_FLAGS_neon} -march=armv8.2-a+bf16)
endif()

# Kernels are slow unless everything in them is inlined, so they are optimised in debug builds as well.
# With sanitizers -O3 takes minutes a file, -O1 half a minute.
set(BLOCKSPARSE_KERNEL_FLAGS $<IF:$<BOOL:${BLOCKSPARSE_SANITIZE}>,-O1,-O3> -ffp-contract=fast -fno-math-errno -fno-trapping-math)

function(blocksparse_add_isa_sources target folder)
  foreach(isa IN LISTS BLOCKSPARSE_ISAS)
    set(source ${PROJECT_SOURCE_DIR}/src/${folder}/cpu/cpu_${isa}.cc)
    if(NOT EXISTS ${source})  # the folder has no kernel of its own for it
      continue()
    endif()
    target_sources(${target} PRIVATE ${source})
    set_source_files_properties(${source} PROPERTIES
      COMPILE_OPTIONS "${BLOCKSPARSE_FLAGS_${isa}};${BLOCKSPARSE_KERNEL_FLAGS}")
  endforeach()
endfunction()

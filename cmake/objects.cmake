# All of the library, compiled once: the shared library, tests and tools link the same objects.
add_library(blocksparse_objects OBJECT
  src/adapters/torch_api.cc
  src/adapters/torch_conv.cc
  src/adapters/torch_glu.cc
  src/adapters/torch_linear.cc
  src/adapters/torch_lstm.cc
  src/adapters/torch_shim.cc
  src/adapters/xla_api.cc
  src/adapters/xla_conv.cc
  src/adapters/xla_glu.cc
  src/adapters/xla_linear.cc
  src/adapters/xla_lstm.cc
  src/capi/c_api.cc
  src/capi/conv.cc
  src/capi/deep_update.cc
  src/capi/glu.cc
  src/capi/layout.cc
  src/capi/linear.cc
  src/capi/lstm.cc
  src/capi/multiplicative.cc
  src/capi/norm.cc
  src/core/build_index.cc
  src/core/checks.cc
  src/core/device_index.cc
  src/core/index.cc
  src/core/layout.cc
  src/core/schedule.cc
  src/core/text.cc
  src/cpu/isa.cc
  src/cpu/pages.cc
  src/cpu/runtime.cc
  src/cpu/threads.cc
  src/gemm/cpu/driver.cc
  src/gemm/cpu/gradient_plan.cc
  src/gemm/cpu/kernels.cc
  src/gemm/cpu/plan.cc
  src/gemm/cuda/families.cc
  src/gemm/cuda/index_for_card.cc
  src/gemm/cuda/problem.cc
  src/gemm/cuda/wgmma/strip_order.cc
  src/gemm/product.cc
  src/gemm/reference.cc
  src/graphs/balanced_random.cc
  src/graphs/barabasi_albert.cc
  src/graphs/by_name.cc
  src/graphs/random.cc
  src/graphs/regular.cc
  src/graphs/report.cc
  src/graphs/watts_strogatz.cc
  src/ops/bias/bias.cc
  src/ops/conv/conv.cc
  src/ops/conv/cpu/gradient.cc
  src/ops/conv/cpu/panels.cc
  src/ops/conv/cpu/plan.cc
  src/ops/conv/cpu/product.cc
  src/ops/conv/cuda/gather/phases.cc
  src/ops/conv/cuda/halo/plan.cc
  src/ops/conv/cuda/halo/raster.cc
  src/ops/conv/cuda/halo_block/plan.cc
  src/ops/conv/cuda/order/plan.cc
  src/ops/conv/cuda/select.cc
  src/ops/conv/geometry.cc
  src/ops/conv/reference.cc
  src/ops/glu/cpu/driver.cc
  src/ops/glu/cpu/kernels.cc
  src/ops/glu/glu.cc
  src/ops/glu/reference.cc
  src/ops/linear/linear.cc
  src/ops/lstm/cell.cc
  src/ops/lstm/cpu/driver.cc
  src/ops/lstm/cpu/kernels.cc
  src/ops/lstm/cuda/w_in_smem/plan.cc
  src/ops/lstm/lstm.cc
  src/ops/lstm/reference.cc
  src/ops/norm/cpu/driver.cc
  src/ops/norm/cpu/kernels.cc
  src/ops/norm/norm.cc
  src/ops/sequence/deep_update.cc
  src/ops/sequence/deep_update_steps.cc
  src/ops/sequence/multiplicative.cc
  src/ops/sequence/multiplicative_steps.cc
  src/ops/sequence/steps.cc
  ${BLOCKSPARSE_CUDA_SOURCES})
set(BLOCKSPARSE_OBJECTS blocksparse_objects)
# Kernels that only cards of 9.0a run are compiled for these alone. The empty ones of another card took nvcc a quarter to
# a half of the time beside them.
function(blocksparse_add_kernels_of_90a)
  if(BLOCKSPARSE_SM90A)
    target_sources(blocksparse_objects_90a PRIVATE ${ARGN})
  elseif(BLOCKSPARSE_HAS_CUDA)
    target_sources(blocksparse_objects PRIVATE ${ARGN})
  endif()
endfunction()
if(BLOCKSPARSE_SM90A)
  set(architectures ${BLOCKSPARSE_CUDA_ARCHITECTURES})
  list(FILTER architectures INCLUDE REGEX "^90a")
  add_library(blocksparse_objects_90a OBJECT)
  set_target_properties(blocksparse_objects_90a PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  list(APPEND BLOCKSPARSE_OBJECTS blocksparse_objects_90a)
endif()
include(families)
blocksparse_add_kernels_of_90a(
  src/ops/conv/cuda/gather/bf16.cu
  src/ops/conv/cuda/gather/f16.cu
  src/ops/conv/cuda/halo/bf16.cu
  src/ops/conv/cuda/halo/f16.cu
  src/ops/conv/cuda/halo_block/bf16.cu
  src/ops/conv/cuda/halo_block/f16.cu)
blocksparse_add_isa_sources(blocksparse_objects gemm)
blocksparse_add_isa_sources(blocksparse_objects ops/glu)
blocksparse_add_isa_sources(blocksparse_objects ops/lstm)
blocksparse_add_isa_sources(blocksparse_objects ops/norm)
foreach(target IN LISTS BLOCKSPARSE_OBJECTS)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include> PRIVATE src)
  target_compile_definitions(${target} PRIVATE BS_VERSION="${PROJECT_VERSION}")
  # FMA is part of some baselines (64-bit Arm): layouts and the reference are to be the same everywhere. Kernels fuse.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
  target_link_libraries(${target} PRIVATE blocksparse_warnings OpenMP::OpenMP_CXX Threads::Threads)
  if(BLOCKSPARSE_HAS_CUDA)
    target_include_directories(${target} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  endif()
endforeach()
list(TRANSFORM BLOCKSPARSE_OBJECTS REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")

add_library(blocksparse_warnings INTERFACE)
set(cxx_warnings
  -Wall -Wextra -Wpedantic -Wimplicit-fallthrough
  # Vectors are passed only between functions that are inlined.
  -Wno-psabi
  $<$<BOOL:${BLOCKSPARSE_WERROR}>:-Werror>)
# nvcc: what it says itself about our code, and what the host's compiler says. Its intermediate code is not pedantic.
set(cuda_warnings
  $<$<BOOL:${BLOCKSPARSE_WERROR}>:--Werror=all-warnings>
  -Xcompiler=-Wall,-Wextra)
target_compile_options(blocksparse_warnings INTERFACE
  "$<$<COMPILE_LANGUAGE:C,CXX>:${cxx_warnings}>" $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
  "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings}>")

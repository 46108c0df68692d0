add_library(blocksparse_warnings INTERFACE)
target_compile_options(blocksparse_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wnon-virtual-dtor -Wimplicit-fallthrough
  # Vectors are passed only between functions that are inlined.
  -Wno-psabi
  $<$<BOOL:${BLOCKSPARSE_WERROR}>:-Werror>)

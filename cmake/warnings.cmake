add_library(blocksparse_warnings INTERFACE)
target_compile_options(blocksparse_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wimplicit-fallthrough $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
  # Vectors are passed only between functions that are inlined.
  -Wno-psabi
  $<$<BOOL:${BLOCKSPARSE_WERROR}>:-Werror>)

# TensorFlow's ops: a library of its own beside libblocksparse, on the C interface. It is compiled everywhere, since it
# needs nothing of TensorFlow; see src/adapters/tensorflow_api.h.
add_library(blocksparse_tensorflow MODULE
  src/adapters/tensorflow_api.cc
  src/adapters/tensorflow_conv.cc
  src/adapters/tensorflow_linear.cc
  src/adapters/tensorflow_lstm.cc
  src/adapters/tensorflow_ops.cc)
target_include_directories(blocksparse_tensorflow PRIVATE include src)
target_link_libraries(blocksparse_tensorflow PRIVATE blocksparse blocksparse_warnings ${CMAKE_DL_LIBS})
target_link_options(blocksparse_tensorflow PRIVATE $<$<CXX_COMPILER_ID:GNU,Clang>:LINKER:--exclude-libs,ALL>)
set_target_properties(blocksparse_tensorflow PROPERTIES INSTALL_RPATH "$ORIGIN")

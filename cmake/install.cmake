# Installs library, headers, CMake package and pkg-config file. In a wheel all of it goes into the Python package, so a
# C++ program can use what pip installed: `python -m blocksparse --cmake-dir`.
include(CMakePackageConfigHelpers)

install(TARGETS blocksparse EXPORT blocksparseTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS blocksparse_tensorflow LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/blocksparse DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(BLOCKSPARSE_TOOLS)
  install(TARGETS blocksparse-bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/blocksparse)
install(EXPORT blocksparseTargets NAMESPACE blocksparse:: DESTINATION ${cmake_dir})
configure_package_config_file(cmake/blocksparseConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/blocksparseConfig.cmake
  INSTALL_DESTINATION ${cmake_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/blocksparseConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/blocksparseConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/blocksparseConfigVersion.cmake DESTINATION ${cmake_dir})

configure_file(cmake/blocksparse.pc.in blocksparse.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/blocksparse.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

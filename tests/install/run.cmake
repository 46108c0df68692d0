# cmake -DBUILD=<build folder> -DSOURCE=<tests/install> -DWORK=<scratch> -DGENERATOR=<name> -DNM=<nm> -DTOOLCHAIN=<file> -P run.cmake
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
# Moved after it was installed: nothing may remember where it was built.
file(RENAME ${WORK}/prefix ${WORK}/moved)
file(GLOB_RECURSE packages ${WORK}/moved/*/blocksparseConfig.cmake)
cmake_path(GET packages PARENT_PATH package_dir)
file(GLOB_RECURSE pc ${WORK}/moved/*/blocksparse.pc)
cmake_path(GET pc PARENT_PATH pc_dir)
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${WORK}/build -DCMAKE_TOOLCHAIN_FILE=${TOOLCHAIN} -Dblocksparse_DIR=${package_dir} -DPKG_CONFIG_DIR=${pc_dir})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${CMAKE_CTEST_COMMAND} --test-dir ${WORK}/build --output-on-failure)

# Only what is declared in the headers is visible.
file(GLOB library ${WORK}/moved/lib*/libblocksparse.so ${WORK}/moved/lib*/*/libblocksparse.so)
execute_process(COMMAND ${NM} -DC --defined-only ${library} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]* [TW] [^\n]*" shown "${symbols}")
foreach(symbol IN LISTS shown)
  if(NOT symbol MATCHES " (bs_|blocksparse::|std::|void std::|typeinfo|vtable|operator|_init|_fini)")
    message(SEND_ERROR "an unexpected symbol is visible: ${symbol}")
  endif()
  if(symbol MATCHES "blocksparse::(linear|threads_detail|text_detail)::")
    message(SEND_ERROR "an internal symbol is visible: ${symbol}")
  endif()
endforeach()

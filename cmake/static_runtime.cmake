# blocksparse_static_runtime(LIBRARY others...): programs that link LIBRARY, and with it the others, hold libstdc++,
# libgcc and, where there is a static one, libgomp. The C library stays outside: card drivers and opponents are opened at
# run time, which a static one cannot do.
function(blocksparse_static_runtime library)
  set(others ${ARGN})
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libgomp.a OUTPUT_VARIABLE gomp
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(IS_ABSOLUTE "${gomp}")
    list(TRANSFORM others REPLACE "^OpenMP::OpenMP_CXX$" "${gomp}")
    target_compile_options(${library} PUBLIC $<$<COMPILE_LANGUAGE:CXX>:${OpenMP_CXX_FLAGS}>)
  else()
    message(STATUS "no static libgomp: programs need the shared one")
  endif()
  target_link_libraries(${library} PUBLIC ${others})
  target_link_options(${library} PUBLIC -static-libstdc++ -static-libgcc)
endfunction()

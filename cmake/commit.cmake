# cmake -DSOURCE=<folder> -DHEADER=<file> -P commit.cmake: writes which commit is built; a file that is right stays as it is.
find_package(Git QUIET)
set(commit "")
if(GIT_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${SOURCE} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${SOURCE} status --porcelain --untracked-files=no -- src include tools cmake
    OUTPUT_VARIABLE changes ERROR_QUIET)
  if(commit AND changes)
    string(APPEND commit " with changes")
  endif()
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define BS_COMMIT \"${commit}\"\n")

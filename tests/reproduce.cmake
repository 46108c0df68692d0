# cmake -DBENCH=<blocksparse-bench, and before it an emulator> -DPROBLEMS=<folder> -DWORK=<scratch> -P reproduce.cmake
# The file of results is well formed, and is continued where it was left.
set(results ${WORK}/results.jsonl)

function(reproduce)
  execute_process(COMMAND ${BENCH} --reproduce ${WORK}/problems --output ${results} --samples 2 --rotate 1 ${ARGV}
    RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err)
  set(status ${status} PARENT_SCOPE)
  set(out "${out}" PARENT_SCOPE)
  set(err "${err}" PARENT_SCOPE)
endfunction()

function(expect_lines count)  # a header, and as many problems
  file(STRINGS ${results} lines)
  list(LENGTH lines length)
  if(NOT length EQUAL count)
    message(FATAL_ERROR "${length} lines instead of ${count}: ${lines} ${err}")
  endif()
  list(POP_FRONT lines header)
  foreach(key device isa processors compiler library commit opponents date)
    string(JSON value GET "${header}" ${key})
  endforeach()
  foreach(line IN LISTS lines)
    foreach(key problem threads us us_hot gflops roofline_fraction samples vs)
      string(JSON value GET "${line}" ${key})
    endforeach()
  endforeach()
endfunction()

file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/problems/one.txt "# a comment\nlinear:{fprop,wgrad} f32 n=4 b=8 random(4,0.5)\n")
file(WRITE ${WORK}/problems/two.txt "linear:fprop f32 n=4 b=8 {random(4,0.5),ba(8,2)} threads=1  # one of them again\n")
reproduce()
expect_lines(4)
file(READ ${results} whole)

reproduce()  # nothing is left to do
file(READ ${results} again)
if(NOT again STREQUAL whole)
  message(FATAL_ERROR "a finished file was changed: ${again}")
endif()

string(LENGTH "${whole}" length)  # as if it had been killed while writing
math(EXPR length "${length} - 20")
string(SUBSTRING "${whole}" 0 ${length} torn)
file(WRITE ${results} "${torn}")
reproduce()
expect_lines(4)
string(FIND "${whole}" "{\"problem\": \"linear:fprop f32 n=4 b=8 ba(8,2)" kept)
file(READ ${results} again)
string(SUBSTRING "${whole}" 0 ${kept} whole)
string(SUBSTRING "${again}" 0 ${kept} again)
if(NOT again STREQUAL whole)
  message(FATAL_ERROR "lines that were there have been measured again: ${again}")
endif()

reproduce(--samples 3)
if(status EQUAL 0 OR NOT err MATCHES "another machine, build")
  message(FATAL_ERROR "a file of other conditions was continued: ${err}")
endif()
file(WRITE ${WORK}/problems/three.txt "linear:{fprop f32 n=4 b=8 random(4,0.5)\n")
reproduce(--list)
if(status EQUAL 0 OR NOT err MATCHES "open brace")
  message(FATAL_ERROR "an open brace was not refused: ${err}")
endif()

execute_process(COMMAND ${BENCH} --reproduce ${PROBLEMS} --list OUTPUT_VARIABLE out COMMAND_ERROR_IS_FATAL ANY)
if(NOT out MATCHES "wgrad")
  message(FATAL_ERROR "the folder of problems holds no weight gradient: ${out}")
endif()

# Problems of a card are listed without one.
execute_process(COMMAND ${BENCH} --reproduce --device cuda ${PROBLEMS}/../cuda --list
  OUTPUT_VARIABLE out COMMAND_ERROR_IS_FATAL ANY)
if(NOT out MATCHES "linear:wgrad bf16 [^\n]*device=cuda")
  message(FATAL_ERROR "the folder of problems holds none of a card: ${out}")
endif()
file(WRITE ${WORK}/card.txt "linear:fprop f32 n=4 b=8 random(4,0.5) device=cuda\n")
execute_process(COMMAND ${BENCH} --reproduce ${WORK}/card.txt --list RESULT_VARIABLE status ERROR_VARIABLE err)
if(status EQUAL 0 OR NOT err MATCHES "needs --device cuda")
  message(FATAL_ERROR "a problem of a card was taken for one of the CPU: ${err}")
endif()

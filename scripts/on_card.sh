#!/usr/bin/env bash
# Tests the CUDA kernels on this machine's card, then times a list of problems beside cuBLAS.
#   on_card.sh FOLDER OUT [PROBLEMS] [SECONDS]
# FOLDER holds unit_tests and blocksparse-bench of a build, OUT takes the logs, PROBLEMS is a file of them (without one
# nothing is timed), SECONDS ends the timing. BLOCKSPARSE_CUBLAS names libcublas where it is not found by itself.
# Tests run beside each other, most of their time being the host's; so do the parts of a sanitizer.
set -uo pipefail
folder=$1 out=$2 problems=${3:-} seconds=${4:-300}
failed=0 shards=$(nproc)

step() {  # name limit command...: a line of how it went, and the log's lines that matter
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1 || status=$?
  echo "$name: $((SECONDS - begin)) s, exit status $status"
  grep -aE "FAILED|PASSED|Actual|allowed|SUMMARY|=========  *[A-Z]|rror:" "$out/$name.log" | cut -c1-200 | head -12
  return $status
}

tests=()
for ((i = 0; i < shards; i++)); do
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i \
    step "tests_$i" 400 "$folder/unit_tests" --gtest_filter='*Cuda*-*SelectCuda*:*OnCuda' &
  tests+=($!)
done
for process in "${tests[@]}"; do wait "$process" || failed=1; done
BLOCKSPARSE_FUZZ=1500 step fuzz 90 "$folder/unit_tests" --gtest_filter='*OnCuda' || failed=1

# Some of the cases, for all of them take long: each sweep, each fixture. No 2^31 elements, which are of addresses; no
# graphs and streams, which take minutes so.
some='Awkward/*Cuda*/2?:FewTokens/*Cuda*/1?:FewTokens/*Cuda*/5?:FewTokens/*Cuda*/9?:FewGradients/*Cuda*/1?'
some+=':ManyTokens/*Cuda*/?:ManyTokens/*Cuda*/7?:SmallBlocks/*:ManyRounds/*/?'
some+=':F32*Tokens/*/1?:F32*Tokens/*/6?:F32FewGradients/*/1?'
some+=':F32ManyRounds/*/?:LinearCuda*:DeviceIndexCuda*:NormCuda*:NormCellCuda*:LstmCuda*:OnCards/LstmSweepCuda*/?'
some+=':GluCuda.IsItsEquations:GluCuda.Some*'
some+=':ConvCuda.*:OnCards/ConvCudaSweep*/1?-*TwoToThe31*:*AGraphReplays*:*TwoStreams*:LstmCuda.RandomProblems'
# A sanitizer's errors are this script's too: without an exit status of its own it hands on that of the program. Most of
# a tool's time is the host's, so it has several processes. On an H100 with 16 cores four tools at once, three processes
# each, took 84 to 416 s; racecheck of what repeats calls for its bits had not ended then (2026-11-26).
sanitize() {  # name tool options...
  local name=$1 tool=$2 parts=4 cases=$some
  shift 2
  [[ $tool == racecheck ]] && cases+=':*TwoRunsGiveTheSameBits*:*CallsThatFollowClosely*'
  local processes=()
  for ((i = 0; i < parts; i++)); do
    GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$i \
      step "${name}_$i" 500 compute-sanitizer --tool "$tool" "$@" "$folder/unit_tests" --gtest_filter="$cases" &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || failed=1; done
}
for tool in memcheck synccheck initcheck; do
  sanitize $tool $tool --error-exitcode 9
done
# racecheck reports the notes that loading warps leave, wgmma/feed.cuh says why: those of kernels with notes are shown,
# and fail nothing.
with_notes=kns=wgmma_product,kns=halo_product,kns=row_wgmma_product,kns=four_rows_wgmma_product
sanitize racecheck racecheck --error-exitcode 9 --kernel-name-exclude $with_notes
sanitize racecheck_notes racecheck --kernel-name $with_notes

if [[ -n $problems ]]; then
  timeout "$seconds" "$folder/blocksparse-bench" --device cuda --cold --samples 7 --vs cublas --json --file "$problems" \
    > "$out/times.jsonl" 2> "$out/times.log"
  tail -2 "$out/times.log"
  python3 - "$out/times.jsonl" << 'END'
import json, sys

for line in open(sys.argv[1]):
    r = json.loads(line)
    vs = "".join(f"  {time / r['us']:5.2f}x {name}" for name, time in r["vs"].items())
    print(f"{r['us']:7.2f} us {100 * r['roofline_fraction']:3.0f} % {r['kernel']:8}{vs}  error {r['error']:.2g}  {r['problem'][7:]}")
END
fi
exit $failed

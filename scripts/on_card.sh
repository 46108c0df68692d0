#!/usr/bin/env bash
# Tests the CUDA kernels on this machine's card, then times a list of problems beside cuBLAS.
#   on_card.sh FOLDER OUT [PROBLEMS] [SECONDS]
# FOLDER holds unit_tests and blocksparse-bench of a build, OUT takes the logs, PROBLEMS is a file of them (without one
# nothing is timed), SECONDS ends the timing. BLOCKSPARSE_CUBLAS names libcublas where it is not found by itself.
set -uo pipefail
folder=$1 out=$2 problems=${3:-} seconds=${4:-300}
failed=0

step() {  # name seconds command...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1 || failed=1
  echo "$name: $((SECONDS - begin)) s"
  grep -aE "FAILED|PASSED|SKIPPED|Actual|allowed|SUMMARY|=========  *[A-Z]|rror:" "$out/$name.log" | cut -c1-200 | head -12
}

step tests 300 "$folder/unit_tests" --gtest_filter='*Sweep.*Cuda*:LinearCuda*:*ConvCuda*:*LstmCuda*:*LstmSweepCuda*:NormCuda*'
BLOCKSPARSE_FUZZ=1500 step fuzz 60 "$folder/unit_tests" --gtest_filter='*OnCuda'
# Some of the cases: all of them take minutes. racecheck reports the notes of cuda_many_feed.h, which says why.
some='FewTokens/*Cuda*/1?:FewTokens/*Cuda*/5?:FewTokens/*Cuda*/9?:Awkward/*Cuda*/2?:ManyTokens/*Cuda*/?:ManyTokens/*Cuda*/7?:F32*Tokens/*/1?:F32*Tokens/*/6?:NormCuda*:OnCards/LstmSweepCuda*/?:OnCards/ConvCudaSweep*/1?'
for tool in memcheck racecheck initcheck; do
  step $tool 90 compute-sanitizer --tool $tool "$folder/unit_tests" --gtest_filter="$some"
done
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

"""The machines that docs/performance has a page of: which files of results it is made of, and by what commands."""

from __future__ import annotations

from dataclasses import dataclass

BENCH = "blocksparse-bench --reproduce"
ON_CARD = "blocksparse-bench --device cuda"


@dataclass(frozen=True)
class Source:
    """A file of results, by its name without `.jsonl`."""

    name: str
    command: str  # that made it
    what: str


@dataclass(frozen=True)
class Machine:
    """A page: its files, where a problem's line of a later file counts, and what a reader should know beforehand."""

    page: str
    title: str
    about: str
    sources: tuple[Source, ...] = ()
    crossover: str = ""  # the card's table in src/gemm/cuda/crossover
    remarks: tuple[str, ...] = ()


H200 = Machine(
    "h200",
    "NVIDIA H200",
    "One card of a server, with CUDA 13.0. Dense is cuBLAS, for convolutions cuDNN through PyTorch.",
    (
        Source("2026-11-21-nvidia-h200", "benchmarks/peers/gpu.py", "cuSPARSE, and PyTorch's products"),
        Source("2026-11-22-nvidia-h200-peers", "benchmarks/peers/gpu.py", "torchao and PyTorch's 2:4 products"),
        Source("2026-11-22-nvidia-h200-stk", "benchmarks/peers/gpu.py", "STK"),
        Source("2026-11-22-nvidia-h200", f"{ON_CARD} --vs cublas --samples 3 --reproduce", "1 to 1024 tokens"),
        Source(
            "2026-11-22-nvidia-h200-f32-few-features",
            f"{ON_CARD} --vs cublas --samples 3 --reproduce",
            "f32 and tf32 of 4096 tokens; few features",
        ),
        Source(
            "2026-11-24-nvidia-h200-many",
            f"{ON_CARD} --vs cublas --samples 3 --reproduce benchmarks/problems/cuda/many.txt",
            "512 tokens and more",
        ),
        Source("2026-11-22-nvidia-h200-conv", "benchmarks/conv.py --device cuda", "convolutions"),
        Source(
            "2026-11-26-nvidia-h200-pixelcnn",
            "benchmarks/pixelcnn.py {steps,host,sampling} --device cuda",
            "PixelCNN++, an earlier version",
        ),
        Source(
            "2026-11-26-nvidia-h200-pixelcnn-steps",
            "benchmarks/pixelcnn.py {steps,sampling,sums} --device cuda",
            "PixelCNN++",
        ),
        Source(
            "2026-11-26-nvidia-h200-mlp",
            "benchmarks/mlp.py --device cuda --dtype bfloat16 --passes inference --json",
            "feed-forward parts",
        ),
        Source(
            "2026-11-27-nvidia-h200-plain-triton",
            "benchmarks/peers/gpu.py FILE --problems benchmarks/problems/plain/cuda.txt --samples 3",
            "16 to 8192 tokens beside cuBLAS and plain Triton kernels",
        ),
    ),
    crossover="h200",
    remarks=(
        "Few tokens are bound by memory, many by the path from L2 to shared memory.",
        "Dense wins between few and many tokens where a quarter or more of small blocks are there, and for convolutions"
        " with blocks of 8 or in f32.",
        "With hubs fprop and dgrad take up to a third longer from memory with up to 128 tokens, and a tenth at most"
        " from 256 on.",
        "The plain Triton kernel takes a tenth less time in fprop and dgrad of 1024 tokens with hubs of blocks of 32,"
        " and 4 to 5 % less in wgrad of 2048 tokens and more with 10 % of blocks of 128.",
        "Feed-forward parts with few tokens are far from ideal scaling: two launches take as long as their weights.",
    ),
)

H100 = Machine(
    "h100",
    "NVIDIA H100",
    "One card (80 GB, HBM3) of a server, with CUDA 13.0. Dense is cuBLAS through PyTorch.",
    (
        Source(
            "2026-11-26-nvidia-h100-plain-triton",
            "benchmarks/peers/gpu.py FILE --problems benchmarks/problems/plain/cuda.txt --samples 5",
            "16 to 8192 tokens beside cuBLAS and plain Triton kernels",
        ),
        Source(
            "2026-11-26-nvidia-h100-wide",
            "benchmarks/peers/gpu.py FILE --problems benchmarks/problems/plain/wide.txt --samples 3",
            "12288 x 12288, and few blocks of 32 in a row",
        ),
        Source(
            "2026-11-26-nvidia-h100-pixelcnn",
            "benchmarks/pixelcnn.py {steps,profile} --device cuda",
            "PixelCNN++, an earlier version",
        ),
        Source(
            "2026-11-26-nvidia-h100-pixelcnn-steps",
            "benchmarks/pixelcnn.py {steps,sampling,sums} --device cuda",
            "PixelCNN++",
        ),
    ),
    crossover="h100",
    remarks=(
        "Dense wins with a quarter of blocks of 32 and 512 tokens, and draws level with 256 (dgrad) and 1024 (wgrad).",
        "The plain Triton kernel wins by up to a tenth with 10 % of blocks of 32 and 512 to 2048 tokens, and in wgrad"
        " of blocks of 128.",
        "The plain Triton kernel takes up to a quarter less time with 2 to 4 % of blocks of 32 and 128 to 512 tokens,"
        " and up to a tenth less with 256 tokens of 12288 x 12288. 64 tokens of blocks of 128, and 256 of blocks of 32"
        " with 25 %, have got faster kernels since.",
        "The plain Triton kernel takes a sixth to a quarter less time in fprop and dgrad of 1024 tokens with hubs.",
        "The figures are older than 2026-11-27, when 2 to 10 % of blocks of 32, and hubs, got faster kernels.",
    ),
)

AS_LAST = "as the last program on the machine"
ZEN5 = Machine(
    "zen5",
    "AMD EPYC, Zen 5",
    "A virtual machine of two cores with AVX-512 and its bf16. A core has 48 KB of L1 and 1 MB of L2."
    " It reads at most 18 GB/s from memory. Other jobs ran beside the runs, which had priority (`chrt -f 10`).",
    (
        Source(
            "2026-11-22-amd-epyc-zen5",
            f"{BENCH} benchmarks/problems/cpu/{{width_1024,bf16,tokens,width_4096}}.txt",
            "one thread",
        ),
        Source(
            "2026-11-22-amd-epyc-zen5-threads",
            f"{BENCH} benchmarks/problems/cpu/threads.txt --vs onednn --budget 2",
            "two threads",
        ),
        Source("2026-11-22-amd-epyc-zen5-peers", "benchmarks/peers/cpu.py --samples 5", "libraries called from Python"),
    ),
    remarks=(
        "The weak points are wgrad of blocks of 8, and 512 tokens with blocks of 16.",
        "bf16 is about twice as fast as f32 in fprop and dgrad.",
        "With one token a call through NumPy costs more than the product, so SciPy and TACO win there.",
    ),
)

ZEN3 = Machine(
    "zen3",
    "AMD EPYC, Zen 3",
    "A virtual machine of two cores with AVX2. A core has 32 KB of L1 and 512 KB of L2. Builds ran beside the runs, so"
    " ratios within a line count; AVX2 has become faster since.",
    (
        Source(
            "2026-11-22-amd-epyc-zen3",
            f"{BENCH} benchmarks/problems/cpu/{{width_1024,width_4096,tokens}}.txt --vs all",
            "one thread",
        ),
        Source(
            "2026-11-22-amd-epyc-zen3-threads",
            f"{BENCH} benchmarks/problems/cpu/threads.txt --vs onednn --samples 7 --budget 2",
            "two threads",
        ),
        Source(
            "2026-11-22-amd-epyc-zen3-conv",
            f"{BENCH} benchmarks/problems/conv/cpu.txt --vs onednn --samples 5 --budget 1",
            "convolutions",
        ),
    ),
    remarks=("What is lost to LIBXSMM is lines of W, x and y that come from L2 and L3.",),
)

XEON_AVX512 = Machine(
    "xeon-avx512",
    "Intel Xeon, AVX-512",
    "An Emerald Rapids as a virtual machine of two processors that share a core; neither AMX nor AVX-512's bf16 is"
    " visible. Builds ran on the other processor all the time, so single lines are off by up to a half.",
    (
        Source(
            "2026-11-23-intel-xeon-avx512",
            f"{BENCH} benchmarks/problems/cpu/{{width_1024,tokens,width_4096,types}}.txt"
            " --vs all --samples 9 --budget 1",
            "one thread",
        ),
        Source(
            "2026-11-23-intel-xeon-avx512-conv",
            f"{BENCH} benchmarks/problems/conv/cpu.txt --vs onednn --samples 5 --budget 1",
            f"convolutions, {AS_LAST}",
        ),
    ),
    remarks=(
        "The weak points are blocks of 8, layouts of 2 %, fprop and dgrad of width 4096, and 512 tokens.",
        "LIBXSMM wins wgrad of blocks of 32 and 64 most of all.",
        "bf16 says little here: without instructions for it oneDNN takes many times as long as for f32.",
        "oneDNN's grouped convolutions are faster than block-diagonal layouts.",
    ),
)

XEON_AMX = Machine(
    "xeon-amx",
    "Intel Xeon, AMX",
    "A virtual machine of two processors, one from the other undisturbed. A processor has 2 MB of L2, and reads some"
    " 10 GB/s from memory.",
    (
        Source("2026-11-23-intel-xeon-amx", f"{BENCH} --vs all", "one thread"),
        Source("2026-11-23-intel-xeon-amx-bf16", f"{BENCH} benchmarks/problems/cpu/bf16.txt --vs all", "bf16"),
        Source(
            "2026-11-23-intel-xeon-amx-conv", f"{BENCH} benchmarks/problems/conv/cpu.txt --vs onednn", "convolutions"
        ),
    ),
    remarks=(
        "A product of AMX's tiles takes as long for 8 inputs as for 32, so half of blocks of 8 lose to dense bf16.",
        "LIBXSMM has W in its own order beforehand, which is faster for dgrad and for 512 tokens.",
        "bf16 convolutions are done in f32 and lose to oneDNN's tiles.",
    ),
)

MACHINES = (H200, H100, ZEN5, ZEN3, XEON_AVX512, XEON_AMX)

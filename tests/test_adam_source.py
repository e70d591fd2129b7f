"""adam_cuda.cu as a source file: does it compile cleanly, and does it keep the promises that a compiler cannot check?

What is compared: ptxas's report (spills, registers) with what the file's comments say; the text with what it must not
contain. What the kernels compute is compared elsewhere, on a GPU.
Needs nvcc, no GPU (nothing is linked or run); without nvcc the compile tests are skipped. About 2 s per architecture.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "adam_cuda.cu"
NVCC = shutil.which("nvcc")
KERNELS = {"square_sums_kernel", "total_kernel", "prepare_kernel", "update_kernel"}
# torch.utils.cpp_extension.load adds these; with them half types convert by named functions only.
TORCH_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr",
]  # fmt: skip


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH: adam_cuda.cu cannot be compiled here")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiles_without_warnings_or_spills(arch, tmp_path):
    """The static_asserts inside pin what Python relies on: the sizes of Fragment, Chunk, Group, Constants, State."""
    out = tmp_path / "adam.o"
    command = [NVCC, "-std=c++17", "-O3", f"-arch={arch}", "-Werror", "all-warnings", "--ptxas-options=-v"]
    done = subprocess.run(
        [*command, *TORCH_FLAGS, "-c", str(SOURCE), "-o", str(out)], capture_output=True, text=True, timeout=60
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0 and out.stat().st_size > 0, report
    # One section per kernel, "Compiling entry function '<mangled name>' ... Used 59 registers ...".
    registers = {}
    for section in report.split("Compiling entry function '")[1:]:
        (kernel,) = [name for name in KERNELS if name in section.split("'")[0]]
        registers[kernel] = int(re.search(r"Used (\d+) registers", section)[1])
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", section)
        assert spills and set(spills) == {("0", "0", "0")}, section
    assert registers.keys() == KERNELS, report
    assert registers["update_kernel"] <= 48, registers    # 65,536 / (5 blocks of 256 threads) is 51; the compiler takes them by 8
    assert registers["square_sums_kernel"] <= 32, registers    # 8 blocks of 256 threads fill an sm_80 or sm_90


@pytest.mark.parametrize("word", ["atomic", "torch/", "ATen/", "fast_math", "fast-math", "__fdividef"])
def test_source_does_without(word):
    """Atomics would make the bits depend on timing, torch headers a build take a minute, fast math divisions inexact.

    Comments may speak of torch; of `torch/...` only an #include would.
    """
    assert word.lower() not in SOURCE.read_text().lower()


def test_includes_are_the_four_that_build_in_seconds():
    includes = set(re.findall(r"#include\s*[<\"](.+?)[>\"]", SOURCE.read_text()))
    assert includes == {"cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h", "stdint.h"}


def test_structs_are_pinned_by_static_asserts():
    """Without these lines a field added on one side only would shift every pointer Python writes."""
    asserts = " ".join(re.findall(r"static_assert\((.*)\);", SOURCE.read_text()))
    for struct, size in {"Fragment": 64, "Chunk": 8, "Group": 48, "Constants": 32, "State": 64}.items():
        assert f"sizeof({struct}) == {size}" in asserts


def test_numbers_in_comments():
    """fp32 takes 1 - 0.999f with a relative error of 1.3e-5; 64 squares of 2.3e18 are where fp32 ends."""
    import torch

    in_fp32 = float(1 - torch.tensor(0.999))
    assert 1.2e-5 < abs(in_fp32 - 0.001) / 0.001 < 1.4e-5
    assert 64 * 2.2e18**2 < torch.finfo(torch.float32).max < 64 * 2.4e18**2
    text = SOURCE.read_text()
    assert "1.3e-5" in text and "2e18" in text


def test_style():
    lines = SOURCE.read_text().splitlines()
    assert max(map(len, lines)) <= 118 and "\t" not in SOURCE.read_text() and SOURCE.read_text().isascii()

"""What the host and the sources must agree on, and what no executor can show of an instruction."""

from __future__ import annotations

import re

import pytest

from ringmpi.devices.launch import ARGUMENTS, BACKWARD, BOUNDS, FORWARD, Variant
from ringmpi.softmax import DTYPES, SIGNIFICANT_DIGITS

from .device import kernels
from .library import HERE, KERNELS

VARIANTS = [
    Variant(dtype, head_size, unit)
    for dtype in DTYPES
    for unit in (("Plain",) if dtype in ("float64", "float32") else ("Plain", "Tensor"))
    for head_size in (64, 256)
] + [Variant("float32", 64, "Plain", "long long"), Variant("bfloat16", 64, "Tensor", "long long")]
VARIANTS += [Variant(dtype, 64, "Tensor", rounds_weights=True) for dtype in SIGNIFICANT_DIGITS]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_tiles_threads_and_shared_memory_are_those_of_the_host(variant: Variant) -> None:
    library = kernels(variant)

    for name in (FORWARD, *BACKWARD):
        kernel = library.kernel(name)
        assert (kernel.rows, kernel.columns) == (variant.rows, variant.columns(name))
        assert kernel.threads == variant.threads
        assert kernel.shared_nbytes == variant.shared_nbytes(name)


@pytest.mark.parametrize("kernel", [BOUNDS, FORWARD])
def test_arguments_have_the_hosts_names_and_order(kernel: str) -> None:
    source = (KERNELS / "attention.cu").read_text()
    declared = re.search(rf"{kernel}\((.*?)\) {{", source, re.DOTALL)

    assert declared is not None
    assert tuple(re.findall(r"(\w+)(?:,|$)", declared[1])) == ARGUMENTS[kernel]


def test_arguments_of_the_backward_pass_have_the_hosts_names_and_order() -> None:
    source = (KERNELS / "attention.cu").read_text()
    declared = re.search(r"\bname\((.*?)\)\n", source, re.DOTALL)

    assert declared is not None
    for name, gradient in re.findall(r"^RINGMPI_BACKWARD\((\w+), (\w+)\)", source, re.MULTILINE):
        words = re.findall(r"(\w+)(?:,|$)", declared[1])
        assert tuple(gradient if word == "gradient" else word for word in words) == ARGUMENTS[name]


def test_the_executor_has_a_function_for_each_instruction_and_no_other() -> None:
    names = [
        re.findall(
            r"^(?:template <int PENDING> )?(?:__device__ )?(?:inline )?(?:\w+ )+\**(\w+)\(",
            path.read_text(),
            re.MULTILINE,
        )
        for path in (KERNELS / "ptx.cuh", HERE / "include" / "ptx.cuh")
    ]

    own = {"multiply", "float16_of", "bfloat16_of"}  # which its others are made of
    assert {*names[0]} == {*names[1]} - own
    assert len({*names[0]}) >= 8


#: The instructions with their operands in order, from PTX ISA: what is written, then what is read; of a pair
#: the higher half first.
INSTRUCTIONS = {
    "copy_async": [("cp.async.cg.shared.global [%0], [%1], 16;", ["to", "global"])],
    "commit_copies": [("cp.async.commit_group;", [])],
    "await_copies": [("cp.async.wait_group %0;", ["PENDING"])],
    "load_matrices": [
        (
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];",
            ["matrix[0]", "matrix[1]", "matrix[2]", "matrix[3]", "from"],
        )
    ],
    "load_matrices_transposed": [
        (
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];",
            ["matrix[0]", "matrix[1]", "matrix[2]", "matrix[3]", "from"],
        )
    ],
    "multiply_add": [
        (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};",
            ["d0", "d1", "d2", "d3", "a[0]", "a[1]", "a[2]", "a[3]", "b0", "b1"],
        )
        for kind in ("bf16", "f16")
    ],
    "pack_bfloat16": [("cvt.rn.bf16x2.f32 %0, %1, %2;", ["both", "high", "low"])],
    "pack_float16": [("cvt.rn.f16x2.f32 %0, %1, %2;", ["both", "high", "low"])],
    "unpack_float16": [("cvt.f32.f16 %0, %1;", ["value", "half"])],
}


def test_instructions_are_spelt_and_fed_as_the_manual_says() -> None:
    source = (KERNELS / "ptx.cuh").read_text()
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for name, body in re.findall(
        r"__device__ inline [\w ]+?\**(\w+)\([^{]*\) \{\n(.*?)\n\}", source, re.DOTALL
    ):
        for statement in re.findall(r"asm(?: volatile)?\((.*?)\);(?:\n|$)", body, re.DOTALL):
            text = "".join(re.findall(r'"([^"]*)"', re.split(r":", statement, maxsplit=1)[0]))
            operands = re.findall(r'"[=+]?[a-z]"\(([^()]+)\)', statement)
            found.setdefault(name, []).append((text, operands))

    assert found == INSTRUCTIONS

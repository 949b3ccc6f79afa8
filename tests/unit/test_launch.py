"""The rules by which the GPU's kernels are compiled and launched; none of them needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringmpi.devices.launch import (
    ARGUMENTS,
    BACKWARD,
    BOUNDS,
    FORWARD,
    HEAD_SIZES,
    TILE,
    Launch,
    Sizes,
    Variant,
    head_size,
    index_type,
    unit,
    variant,
)
from ringmpi.errors import ConfigError
from ringmpi.mask import Mask
from ringmpi.softmax import DTYPES

SIZES = Sizes(batch=2, heads=6, kv_heads=3, queries=130, keys=65, head_dim=80)
PLAIN = Variant("float32", 128, "Plain")


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)]
)
def test_a_head_goes_into_the_smallest_class_that_holds_it(head_dim: int, expected: int) -> None:
    assert head_size(head_dim) == expected


@pytest.mark.parametrize("head_dim", [0, -1, 257])
def test_a_head_that_no_class_holds_is_refused(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"head_dim={head_dim}: the kernels take 1 to 256"):
        head_size(head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_units_multiply_16_bits_from_sm_80_on(dtype: str) -> None:
    narrow = dtype in ("float16", "bfloat16")

    assert unit(dtype, (7, 5)) == "Plain"
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
        assert unit(dtype, capability) == ("Tensor" if narrow else "Plain")


class TestIndexType:
    def test_usual_sizes_have_narrow_indices(self) -> None:
        assert index_type(Sizes(1, 32, 8, 2**15, 2**15, 128), "bfloat16") == "int"

    def test_two_to_the_32_elements_need_wide_ones(self) -> None:
        # Their count in 32 bits is 0.
        assert index_type(Sizes(1, 32, 32, 2**20, 2**20, 128), "float16") == "long long"

    @pytest.mark.parametrize("which", ["queries", "keys"])
    @pytest.mark.parametrize(("dtype", "itemsize"), [("float64", 8), ("float32", 4), ("float16", 4)])
    def test_bytes_of_the_state_count_and_a_tile_behind_the_last_one(
        self, which: str, dtype: str, itemsize: int
    ) -> None:
        last = 2**31 // (64 * itemsize) - 2 * TILE - 1
        sizes = replace(Sizes(1, 1, 1, 1, 1, 64), **{which: last})

        assert index_type(sizes, dtype) == "int"
        assert index_type(replace(sizes, **{which: last + 1}), dtype) == "long long"

    def test_the_batch_counts(self) -> None:
        sizes = Sizes(1, 8, 8, 2**16, 2**16, 128)

        assert index_type(sizes, "float32") == "int"
        assert index_type(replace(sizes, batch=8), "float32") == "long long"

    def test_a_variant_has_them(self) -> None:
        wide = variant(Sizes(1, 32, 32, 2**20, 2**20, 128), "float16", (9, 0))

        assert wide == Variant("float16", 128, "Tensor", "long long")
        assert "-DRINGMPI_INDEX=long long" in wide.options
        assert wide.index_dtype == np.int64
        assert variant(SIZES, "float16", (7, 5)) == Variant("float16", 128, "Plain", "int")


class TestLaunch:
    @pytest.mark.parametrize(
        ("kernel", "grid", "block"),
        [
            (BOUNDS, 2, 128),
            (FORWARD, 3 * 6 * 2, 256),
            ("ringmpi_backward_q", 3 * 6 * 2, 256),
            ("ringmpi_backward_k", 2 * 3 * 2, 256),
            ("ringmpi_backward_v", 2 * 3 * 2, 256),
        ],
    )
    def test_blocks_of_threads_cover_the_rows_of_all_heads(
        self, kernel: str, grid: int, block: int
    ) -> None:
        assert PLAIN.launch(kernel, SIZES) == Launch(kernel, grid, block, PLAIN.shared_nbytes(kernel))

    @pytest.mark.parametrize("name", ["batch", "queries", "keys"])
    @pytest.mark.parametrize("kernel", [BOUNDS, FORWARD, *BACKWARD])
    def test_nothing_is_launched_for_nothing(self, kernel: str, name: str) -> None:
        assert PLAIN.launch(kernel, replace(SIZES, **{name: 0})) is None

    def test_more_blocks_than_a_gpu_starts_are_refused(self) -> None:
        sizes = Sizes(1, 2, 2, 2**36, 1, 1)
        wide = Variant("float32", 64, "Plain", "long long")

        with pytest.raises(
            ConfigError, match="2147483648 blocks of threads, and a GPU starts 2147483647"
        ):
            wide.launch(FORWARD, sizes)
        assert wide.launch(FORWARD, replace(sizes, queries=2**36 - 64)) is not None

    @pytest.mark.parametrize("head_size", HEAD_SIZES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_shared_memory_is_within_what_architectures_allow(self, dtype: str, head_size: int) -> None:
        # Of one block: 64 KiB on sm_75, and 99 KiB on the smallest ones that are newer.
        for index in ("int", "long long"):
            for kernel in (FORWARD, *BACKWARD):
                plain = Variant(dtype, head_size, "Plain", index)
                assert plain.shared_nbytes(kernel) <= 64 * 1024
                if dtype in ("float16", "bfloat16"):
                    assert replace(plain, unit="Tensor").shared_nbytes(kernel) <= 99 * 1024


class TestArguments:
    @pytest.mark.parametrize("kernel", [BOUNDS, FORWARD, *BACKWARD])
    def test_each_argument_is_an_array_or_a_scalar(self, kernel: str) -> None:
        scalars = PLAIN.scalars(SIZES, Mask(), 0.5)
        arrays = {"q", "k", "v", "acc", "row_max", "row_sum", "begin", "end", "dout", "lse", "delta"}
        arrays |= {"dq", "dk", "dv", "positions", "key_positions", "documents"}

        assert arrays.isdisjoint(scalars)
        assert {*ARGUMENTS[kernel]} <= arrays | {*scalars}

    @pytest.mark.parametrize("index", ["int", "long long"])
    @pytest.mark.parametrize("dtype", ["float64", "float16"])
    def test_scalars_have_the_kernels_own_types(self, dtype: str, index: str) -> None:
        scalars = Variant(dtype, 64, "Plain", index).scalars(SIZES, Mask(True, 7, (0, 3, 9)), 0.1)

        of_index = np.dtype(np.int32 if index == "int" else np.int64)
        state = np.dtype(np.float64 if dtype == "float64" else np.float32)
        assert {name: value.dtype for name, value in scalars.items()} == {
            "queries": of_index,
            "keys": of_index,
            "group": np.int32,
            "head_dim": np.int32,
            "scale": state,
            "causal": np.int32,
            "window": np.int64,
            "offsets": np.int32,
        }
        assert {name: value.item() for name, value in scalars.items() if name != "scale"} == {
            "queries": 130,
            "keys": 65,
            "group": 2,
            "head_dim": 80,
            "causal": 1,
            "window": 7,
            "offsets": 3,
        }

    def test_no_window_is_negative(self) -> None:
        assert PLAIN.scalars(SIZES, Mask(), 1.0)["window"] == -1

"""The tests of the kernels that ask nothing of the SIMT executor, on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simt.conftest import DeviceOf, Kind
from simt.test_kernels import (
    SEVERAL,
    assert_right,
    bits,
    test_a_nan_reaches_the_gradients_of_its_pairs_and_no_others,
    test_a_nan_value_reaches_exactly_the_rows_that_see_it,
    test_a_weight_changes_by_half_a_unit_in_its_last_place_at_most,
    test_a_wild_key_behind_the_mask_reaches_nobody,
    test_blocks_give_dense_attention_and_its_gradients,
    test_blocks_may_come_in_any_order,
    test_gradients_are_added_to_what_is_there,
    test_large_gradients_of_float16_keep_their_range,
    test_rows_without_a_key_give_and_get_nothing,
    test_the_scale_is_that_of_the_device_and_not_of_a_padded_head,
    test_wide_indices_give_the_same_bits,
)
from unit.attending import attend, cut

__all__ = [
    "test_a_nan_reaches_the_gradients_of_its_pairs_and_no_others",
    "test_a_nan_value_reaches_exactly_the_rows_that_see_it",
    "test_a_weight_changes_by_half_a_unit_in_its_last_place_at_most",
    "test_a_wild_key_behind_the_mask_reaches_nobody",
    "test_blocks_give_dense_attention_and_its_gradients",
    "test_blocks_may_come_in_any_order",
    "test_gradients_are_added_to_what_is_there",
    "test_large_gradients_of_float16_keep_their_range",
    "test_rows_without_a_key_give_and_get_nothing",
    "test_the_scale_is_that_of_the_device_and_not_of_a_padded_head",
    "test_wide_indices_give_the_same_bits",
]


@pytest.mark.parametrize("head_dim", [8, 9, 64, 128])
def test_arrays_that_are_aligned_to_no_more_than_an_item_give_the_same_bits(
    head_dim: int, kind: Kind, device_of: DeviceOf
) -> None:
    case = replace(SEVERAL, head_dim=head_dim, dtype=kind[0])

    found = []
    for shift in (0, 1):
        device = device_of(case, shift=shift)
        assert_right(case, cut(150, 31), device)
        found.append(bits(attend(device, case, case.tensors(), cut(150, 31))[:2]))

    assert found[0] == found[1]

"""A list of pitfalls for ranks that share a model, with the tests for each; these tests exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# number -> (the pitfall, {test file: names of its tests})
PITFALLS: dict[int, tuple[str, dict[str, tuple[str, ...]]]] = {
    1: (
        "a sum is taken of a contiguous copy, and lost",
        {"unit/parallel/test_functions.py": ("test_a_sum_of_a_tensor_that_is_not_contiguous",)},
    ),
    2: (
        "the gradient of an input is summed once per layer that reads it",
        {
            "unit/parallel/test_functions.py": (
                "test_the_gradient_of_an_input_is_summed_once_for_all_layers_that_read_it",
            ),
            "unit/parallel/test_apply.py": ("test_a_block_has_four_sums",),
        },
    ),
    3: (
        "a bias's gradient is summed over the first dimension alone",
        {"unit/parallel/test_functions.py": ("test_column_and_row_are_a_whole_layer_each",)},
    ),
    4: (
        "the norm counts a parameter as often as there are ranks that hold it",
        {
            "unit/engine/test_assemble.py": (
                "test_a_composition_has_the_bits_of_one_process",
                "test_a_gradient_is_clipped_by_its_norm_over_the_world",
            )
        },
    ),
    5: (
        "each stage clips by its own norm",
        {
            "unit/engine/test_assemble.py": (
                "test_a_gradient_is_clipped_by_its_norm_over_the_world",
            )
        },
    ),
    6: (
        "a loss or a gradient is scaled again by each stage, or by tp",
        {
            "unit/pipeline/test_sharded_states.py": (
                "test_the_loss_scale_and_the_accumulation_are_applied_once_over_all_stages",
            ),
            "unit/engine/test_assemble.py": ("test_a_composition_has_the_bits_of_one_process",),
        },
    ),
    7: (
        "sums and means per token of a loss whose logits are split",
        {
            "unit/parallel/test_loss.py": (
                "test_the_arguments_of_cross_entropy_are_supported",
                "test_a_mean_over_no_tokens_equals_torchs",
            )
        },
    ),
    8: (
        "a buffer that was received into is used again while backward needs it, or with another "
        "dtype",
        {
            "ranks/test_pipeline.py": ("test_large_messages_and_a_late_rank",),
            "unit/pipeline/test_executor.py": (
                "test_three_ranks_and_any_number_of_micro_batches",
                "test_a_shape_that_was_not_announced_is_an_error_on_both_sides",
            ),
        },
    ),
    9: (
        "fewer micro-batches than stages, a short last batch, or other lengths hang",
        {
            "unit/engine/test_pieces.py": (
                "test_a_short_last_batch_and_fewer_micro_batches_than_stages_do_not_hang",
            ),
            "unit/pipeline/test_executor.py": ("test_a_short_last_batch_and_new_shapes",),
            "ranks/test_pipeline.py": ("test_three_processes_fewer_micro_batches_and_a_short_one",),
        },
    ),
    10: (
        "a reduction per micro-batch keeps other stages waiting",
        {
            "unit/pipeline/test_sharded_states.py": (
                "test_a_unit_is_gathered_and_reduced_once_whatever_the_micro_batches",
            )
        },
    ),
    11: (
        "replicas of shards sum per micro-batch, not once a step",
        {
            "ranks/test_hybrid.py": (
                "test_a_step_sends_what_sharding_sends_in_a_group_and_one_sum_over_the_groups",
            )
        },
    ),
    12: (
        "hooks behind accumulation do not run where a backward is split in two: such a table is "
        "refused",
        {"unit/pipeline/test_schedule.py": ("test_a_table_of_computations_is_completed",)},
    ),
    13: (
        "labels of another micro-batch",
        {
            "unit/pipeline/test_executor.py": ("test_two_ranks_have_the_bits_of_one_process",),
            "unit/pipeline/test_chain.py": ("test_unmodified_models_have_the_bits_of_one_process",),
        },
    ),
    14: (
        "a loader is cut by the world, not by the data coordinate",
        {
            "unit/engine/test_pieces.py": (
                "test_ranks_of_one_data_coordinate_read_the_same_samples_and_others_read_others",
            ),
            "ranks/test_axis_apis.py": ("test_ranks_of_one_layer_load_the_same_samples",),
        },
    ),
    15: (
        "dropout is the same on all ranks inside a region, or differs outside",
        {
            "ranks/test_tensor_parallel.py": (
                "test_dropout_differs_between_heads_and_is_equal_outside",
            )
        },
    ),
    16: (
        "the padding of a vocabulary is in checkpoints",
        {
            "unit/checkpoint/test_boxes.py": (
                "test_each_element_of_a_range_is_in_one_box_and_padding_in_none",
            ),
            "unit/checkpoint/test_piece.py": ("test_every_mesh_saves_the_same_whole_model",),
        },
    ),
    17: (
        "uneven shards are taken for even ones",
        {
            "unit/parallel/test_apply.py": ("test_uneven_heads_and_widths",),
            "unit/parallel/test_plans.py": ("test_heads_stay_whole_and_the_first_ranks_get_more",),
        },
    ),
    18: (
        "one rank is missing in a group: an overflow on one stage alone",
        {
            "ranks/test_pipeline_engine.py": (
                "test_an_overflow_on_one_piece_of_the_model_skips_the_step_on_all",
            )
        },
    ),
    19: (
        "checkpoints have a stage's own names",
        {
            "unit/pipeline/test_stage.py": (
                "test_a_stage_holds_its_own_parameters_under_their_names",
            ),
            "ranks/test_pipeline_engine.py": (
                "test_a_checkpoint_of_pipeline_stages_resumes_without_stages_and_back",
            ),
        },
    ),
    20: (
        "many small stages on one host: what a message and a pair of ranks cost",
        {
            "unit/pipeline/test_executor.py": (
                "test_messages_of_known_shape_have_no_header",
                "test_pairs_are_made_in_few_lots",
            )
        },
    ),
}


@cache
def names_in(path: str) -> set[str]:
    """Return the names of the test functions in one file."""
    tree = ast.parse((TESTS / path).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("number", PITFALLS)
def test_every_pitfall_has_tests(number: int) -> None:
    _, tests = PITFALLS[number]
    assert tests
    for path, names in tests.items():
        assert set(names) <= names_in(path), path


def test_no_pitfall_is_left_out() -> None:
    assert list(PITFALLS) == list(range(1, 21))

"""Test the schedule of small examples, and the settings for window, keep and ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deepseek_zero.planner.added_actions import Additions
from deepseek_zero.planner.enclosed_units import enclosing
from deepseek_zero.planner.make_schedule import plan_schedule
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.planner.schedule import Action, ActionKind, Pass, Schedule
from deepseek_zero.planner.schedule_proof import verify
from deepseek_zero.planner.volume import passes_of
from deepseek_zero.tiers.tier import Tier

SIZES = [10, 100, 100, 100]  # the root and three blocks


def peak_live_numel(schedule: Schedule, sizes: Sequence[int]) -> int:
    """Return the largest number of gathered elements that are alive at once."""
    live = 0
    peak = 0
    for action in schedule.actions():
        if action.kind is ActionKind.GATHER:
            live += sizes[action.unit]
        elif action.kind is ActionKind.RELEASE:
            live -= sizes[action.unit]
        peak = max(peak, live)
    return peak


def schedule_of(
    window: int, ahead: int = 0, keep: int = 10**9, sizes: list[int] = SIZES, overlap: bool = True
) -> Schedule:
    settings = PlanSettings(
        window_numel=window, ahead_numel=ahead, keep_numel=keep, overlap=overlap
    )
    return plan_schedule(sizes, range(len(sizes)), settings)


def test_without_a_window_each_unit_is_gathered_when_used_and_released_at_once() -> None:
    assert str(schedule_of(window=0)) == (
        "G0 F0 G1 F1 R1 G2 F2 R2 G3 F3 R3 R0 "  # forward
        # In backward, gradients are reduced (S) before the release.
        "G0 B0 G3 B3 S3 R3 G2 B2 S2 R2 G1 B1 S1 R1 S0 R0"
    )


def test_with_a_window_over_the_model_each_unit_is_gathered_once_and_kept() -> None:
    assert (
        str(schedule_of(window=10**9))
        == "G0 F0 G1 F1 G2 F2 G3 F3 B0 B3 S3 R3 B2 S2 R2 B1 S1 R1 S0 R0"
    )


def test_a_window_between_keeps_the_units_that_backward_needs_first() -> None:
    schedule = schedule_of(window=250)
    assert schedule.kept == {0, 3, 2}
    assert str(schedule) == "G0 F0 G1 F1 R1 G2 F2 G3 F3 B0 B3 S3 R3 B2 S2 R2 G1 B1 S1 R1 S0 R0"


def test_the_next_unit_is_gathered_in_advance_within_the_window() -> None:
    assert str(schedule_of(window=210, ahead=100, keep=-1)) == (
        "G0 G1 F0 G2 F1 R1 G3 F2 R2 F3 R3 R0 G0 G3 B0 G2 B3 S3 R3 G1 B2 S2 R2 B1 S1 R1 S0 R0"
    )
    assert str(schedule_of(window=209, ahead=100, keep=-1)).startswith("G0 G1 F0 F1 R1 G2 F2"), (
        "the window closes first"
    )
    one_ahead = str(schedule_of(window=10**9, ahead=100, keep=-1))
    assert str(schedule_of(window=10**9, ahead=1, keep=-1)) == one_ahead, (
        "the next unit, whatever its size"
    )
    assert str(schedule_of(window=10**9, ahead=0, keep=-1)) == str(schedule_of(window=0))


def test_without_overlap_nothing_is_gathered_ahead() -> None:
    ahead = schedule_of(window=210, ahead=100, keep=-1, overlap=False)
    assert str(ahead) == str(schedule_of(window=210, ahead=0, keep=-1))


def test_keep_counts_the_elements_between_forward_and_backward_of_a_unit() -> None:
    # Before unit 3 is used again, only the root is used (2 x 10 elements). Before unit 2 is used
    # again, root and unit 3 are used (2 x 110).
    keeps = (-1, 0, 19, 20, 219, 220, 10**9)
    assert [sorted(schedule_of(10**9, keep=keep).kept) for keep in keeps] == [
        [], [0], [0], [0, 3], [0, 3], [0, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip


def test_an_agreed_order_is_used_in_forward_and_reversed_in_backward_root_first() -> None:
    schedule = plan_schedule(SIZES, [0, 2, 1, 3], PlanSettings(window_numel=0))
    assert schedule.forward.order == (0, 2, 1, 3)
    assert schedule.backward.order == (0, 3, 1, 2)
    assert [schedule.backward.position[unit] for unit in (0, 3, 1, 2)] == [0, 1, 2, 3]


def test_with_offloaded_weights_the_last_unit_of_forward_stays_for_backward() -> None:
    settings = PlanSettings(window_numel=0, weight_tier=Tier.NVME)
    schedule = plan_schedule(SIZES, range(4), settings)
    assert (
        str(schedule) == "G0 F0 G1 F1 R1 G2 F2 R2 G3 F3 B0 B3 S3 R3 G2 B2 S2 R2 G1 B1 S1 R1 S0 R0"
    )
    assert peak_live_numel(schedule, SIZES) == peak_live_numel(schedule_of(window=0), SIZES) == 110
    far = plan_schedule(SIZES, range(4), replace(settings, keep_numel=19))
    assert far.kept == {0}, "the reuse distance holds"
    nested = plan_schedule([10, 20, 50, 50, 20, 50, 50], range(7), settings, enclosing(NAMES))
    assert nested.kept == {0, 4, 6}, "the root, the last block, its last tile"
    assert peak_live_numel(nested, [10, 20, 50, 50, 20, 50, 50]) == 80


def test_units_that_shard_nothing_cost_no_window() -> None:
    schedule = schedule_of(window=100, sizes=[0, 0, 100])
    assert schedule.kept == {0, 1, 2}


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_uses_only_what_is_gathered_and_releases_what_it_gathers(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(0, 50) for _ in range(draw.randint(1, 9))]
    order = [0, *draw.sample(range(1, len(sizes)), len(sizes) - 1)]
    window, ahead, keep = (draw.choice([0, 10, 60, 150, 10**9]) for _ in range(3))
    tier = draw.choice(list(Tier))
    settings = PlanSettings(
        window_numel=window, ahead_numel=ahead, keep_numel=keep, weight_tier=tier
    )
    schedule = plan_schedule(sizes, order, settings)
    live: set[int] = set()
    for action in schedule.actions():
        if action.kind is ActionKind.GATHER:
            assert action.unit not in live
            live.add(action.unit)
        else:
            assert action.unit in live, f"{action} in {schedule}"
            live -= {action.unit} if action.kind is ActionKind.RELEASE else set()
    assert not live
    needed = sizes[0] + max(sizes[1:], default=0)  # the root and one block, for any window
    assert peak_live_numel(schedule, sizes) <= max(window, needed)


def test_the_peak_is_the_root_and_one_block_without_a_window_and_the_model_with_a_wide_one() -> (
    None
):
    assert peak_live_numel(schedule_of(window=0), SIZES) == 110
    assert peak_live_numel(schedule_of(window=250), SIZES) == 210
    assert peak_live_numel(schedule_of(window=10**9), SIZES) == 310


# -- layerwise order, and actions once per step


def test_layerwise_a_unit_takes_all_micro_batches_on_one_gather_backward_last_one_first() -> None:
    settings = PlanSettings(window_numel=0, layerwise_micro_batches=2)
    schedule = plan_schedule(
        [10, 100, 100], range(3), settings, additions=Additions(cut={1, 2}, ahead={1})
    )
    assert str(schedule) == (
        "G0 F0 G1 F1.0 F1.1 R1 G2 F2.0 F2.1 R2 R0 G0 B0 G2 B2.1 B2.0 S2 R2 G1 B1.1 B1.0 S1 U1 R1 "
        "S0 R0"
    )
    assert " ".join(map(str, schedule.inference.actions)) == "G0 F0 G1 F1 R1 G2 F2 R2 R0", (
        "nothing is kept anyway"
    )
    assert (schedule.forward.order, schedule.backward.order) == ((0, 1, 2), (0, 2, 1))
    assert schedule.forward.gathers == ((0,), (1,), (2,))


@pytest.mark.parametrize("seed", range(50))
def test_layerwise_actions_except_forwards_and_backwards_equal_those_of_a_whole_batch(
    seed: int,
) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(0, 50) for _ in range(draw.randint(2, 9))]
    window, ahead = (draw.choice([0, 10, 60, 150, 10**9]) for _ in range(2))
    settings = PlanSettings(window_numel=window, ahead_numel=ahead)
    cut = draw.sample(range(1, len(sizes)), draw.randint(1, len(sizes) - 1))
    parts = replace(settings, layerwise_micro_batches=draw.randint(2, 5))
    whole, layerwise = (
        plan_schedule(sizes, range(len(sizes)), settings),
        plan_schedule(sizes, range(len(sizes)), parts, additions=Additions(cut=cut)),
    )
    assert list(
        dict.fromkeys(Action(each.kind, each.unit) for each in layerwise.forward.actions)
    ) == list(whole.forward.actions)
    assert list(
        dict.fromkeys(Action(each.kind, each.unit) for each in layerwise.backward.actions)
    ) == list(whole.backward.actions)
    for unit in range(len(sizes)):
        expected = range(parts.layerwise_micro_batches) if unit in cut else [None]
        assert [each.micro_batch for each in layerwise.forward.computes[unit]] == list(expected)
        assert [each.micro_batch for each in layerwise.backward.computes[unit]] == list(expected)[
            ::-1
        ]


def test_replicas_are_summed_once_a_step_after_all_units_and_before_updates() -> None:
    schedule = plan_schedule(
        [10, 100],
        range(2),
        PlanSettings(window_numel=0),
        additions=Additions(all_reduced=(0, 1), ahead={1}),
    )
    assert " ".join(map(str, schedule.backward.actions)) == "G0 B0 G1 B1 S1 R1 S0 A1 U1 A0 R0"
    assert " ".join(map(str, schedule.accumulate.actions)) == "G0 B0 G1 B1 S1 R1 S0 R0"
    assert [times for _, times in passes_of(schedule, 4)] == [4, 3, 1]


def test_whole_gradients_are_summed_in_the_backward_that_ends_a_step() -> None:
    schedule = plan_schedule([0, 0], range(2), PlanSettings(), reduces_each_backward=False)
    assert (schedule.accumulate.reduces, schedule.backward.reduces) == ((), (1, 0))


# -- the verifier


def program(text: str) -> Pass:
    kinds = {kind.value: kind for kind in ActionKind}
    parts = [(word[0], *word[1:].split(".")) for word in text.split()]
    return Pass(tuple(Action(kinds[part[0]], int(part[1]), *map(int, part[2:])) for part in parts))


FORWARD, BACKWARD = "G0 F0 G1 F1.0 F1.1 R1 R0", "G0 B0 G1 B1.1 B1.0 S1 R1 S0 A1 A0 R0"
SOUND = (FORWARD, BACKWARD)


@pytest.mark.parametrize(
    ("forward", "backward", "says"),
    [
        (
            "G0 F0 F1.0 F1.1 R0",
            BACKWARD,
            r"F1\.0 uses \[1\], which is not gathered, in \.\.\. G0 F0 F1\.0",
        ),
        ("G0 F0 G1 F1.0 R1 F1.1 R0", BACKWARD, r"F1\.1 uses \[1\], which is not gathered"),
        ("G0 F0 G1 R0 F1.0 F1.1 R1", BACKWARD, r"F1\.0 uses \[0\], which is not gathered"),
        ("G0 F0 G1 F1.0 R1 G1 F1.1 R1 R0", BACKWARD, "G1 is the second gather of a pass"),
        ("G0 F0 G1 G1 F1.0 F1.1 R1 R0", BACKWARD, "G1 gathers a gathered unit"),
        ("G0 F0 G1 F1.0 F1.1 R1 R1 R0", BACKWARD, "R1 releases a unit that is not gathered"),
        ("G0 F0 G1 F1.0 F1.0 R1 R0", BACKWARD, r"F1\.0 computes a second time"),
        ("G0 F0 G1 U1 F1.0 F1.1 R1 R0", BACKWARD, "U1 updates a gathered unit"),
        ("G0 F0 U1 U1 G1 F1.0 F1.1 R1 R0", BACKWARD, "U1 is the second update of a pass"),
        (FORWARD, BACKWARD.replace("B1.1", "B1.2"), r"B1\.2 has no forward"),
        (FORWARD, BACKWARD.replace("B1.1 ", ""), "S1 is before the last backward of its unit"),
        (
            FORWARD,
            BACKWARD.replace("B1.0 S1", "S1 B1.0"),
            "S1 is before the last backward of its unit",
        ),
        (FORWARD, BACKWARD.replace("S1", "S1 S1"), "S1 is the second reduction of a backward"),
        (
            FORWARD,
            BACKWARD.replace("B1.1 B1.0 S1 ", ""),
            r"A1 is before the reductions of \[1\]",
        ),
        (
            FORWARD,
            BACKWARD.replace("S0 A1", "A1 S0"),
            r"A1 is before the reductions of \[0\]",
        ),
        (FORWARD, BACKWARD.replace("A1", "A1 A1"), "A1 is the second sum over replicas"),
        (FORWARD, BACKWARD.replace("S1", "S1 U1"), "U1 is before the last reduction of its unit"),
        (FORWARD, BACKWARD.removesuffix(" R0"), r"units \[0\] remain gathered"),
        (FORWARD, "G0 B0 S0 R0", r"units \[1\] have no backward"),
        (
            FORWARD,
            BACKWARD.replace("S1 ", "").replace("A1 A0 ", ""),
            r"units \[1\] are reduced or not",
        ),
        (FORWARD, BACKWARD.replace("A1 ", ""), r"units \[1\] are summed over replicas or not"),
    ],
)
def test_a_program_that_breaks_a_rule_is_refused_with_the_action_that_does(
    forward: str, backward: str, says: str
) -> None:
    accumulate, kept = program(SOUND[1].replace("A1 A0 ", "")), frozenset[int]()
    inference = program("G0 F0 R0")
    sound = Schedule(program(SOUND[0]), inference, accumulate, program(SOUND[1]), kept)
    verify(sound, all_reduced=(0, 1))
    if forward is FORWARD:
        broken = replace(sound, backward=program(backward))
    else:
        broken = replace(sound, forward=program(forward))
    with pytest.raises(AssertionError, match=says):
        verify(broken, all_reduced=(0, 1))


def test_a_sum_that_is_not_in_the_plan_is_refused() -> None:
    additions = Additions(all_reduced=(0, 1))
    sound = plan_schedule([10, 100], range(2), PlanSettings(), additions=additions)
    for facts in ({"all_reduced": ()}, {"all_reduced": (0, 1), "reduces_each_backward": False}):
        with pytest.raises(AssertionError, match="unlike the plan"):
            verify(sound, **facts)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="remain gathered after a forward without backward"):
        verify(replace(sound, inference=program("G0 F0")), all_reduced=(0, 1))


# -- nested units

NAMES = ["root", "a", "a.t.0", "a.t.1", "b", "b.t.0", "b.t.1"]


def test_units_are_inside_the_nearest_unit_with_a_prefix_of_their_name() -> None:
    assert enclosing(NAMES) == {2: 1, 3: 1, 5: 4, 6: 4}
    assert enclosing(["root", "root.a", "ab", "a", "a.b.c", "a.b.c.d"]) == {4: 3, 5: 4}


def test_a_unit_is_in_use_until_the_last_inside_it_is_done() -> None:
    settings = PlanSettings(window_numel=0)
    schedule = plan_schedule([10, 20, 50, 50, 20, 50, 50], range(7), settings, enclosing(NAMES))
    assert str(schedule) == (
        "G0 F0 G1 F1 G2 F2 R2 G3 F3 R3 R1 G4 F4 G5 F5 R5 G6 F6 R6 R4 R0 "
        "G0 B0 G4 B4 G6 B6 S6 R6 G5 B5 S5 R5 S4 R4 G1 B1 G3 B3 S3 R3 G2 B2 S2 R2 S1 R1 S0 R0"
    )
    assert peak_live_numel(schedule, [10, 20, 50, 50, 20, 50, 50]) == 80, (
        "the root, a block, a tile"
    )


@pytest.mark.parametrize("seed", range(100))
def test_any_schedule_of_nested_units_gathers_a_unit_and_its_enclosing_units(
    seed: int,
) -> None:
    draw = random.Random(seed)
    names = ["root"]
    while len(names) < draw.randint(2, 12):
        outer = draw.choice(names)
        names.append(f"{outer}.{len(names)}" if outer != "root" else f"{len(names)}")
    names[1:] = sorted(names[1:])  # in order of declaration: outer units first
    around = enclosing(names)
    sizes = [draw.randint(0, 50) for _ in names]
    window, ahead, keep = (draw.choice([0, 10, 60, 150, 10**9]) for _ in range(3))
    tier = draw.choice(list(Tier))
    settings = PlanSettings(
        window_numel=window, ahead_numel=ahead, keep_numel=keep, weight_tier=tier
    )
    schedule = plan_schedule(sizes, range(len(names)), settings, around)
    live: set[int] = set()
    chains = {}
    for action in schedule.actions():
        chain = [action.unit]
        while chain[-1] in around:
            chain.append(around[chain[-1]])
        chains[action.unit] = sizes[0] + sum(sizes[unit] for unit in chain if unit)
        if action.kind is ActionKind.GATHER:
            assert action.unit not in live
            live.add(action.unit)
        else:
            assert {0, *chain} <= live, f"{action} in {schedule}"
            live -= {action.unit} if action.kind is ActionKind.RELEASE else set()
    assert not live
    assert peak_live_numel(schedule, sizes) <= max(window, *chains.values())

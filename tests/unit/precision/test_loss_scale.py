"""The loss scale is compared with tables computed by hand."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import ConfigError, UsageError
from deepseek_zero.precision.loss_scale import LossScaleError, LossScaler, LossScaleSettings

GOOD, BAD = False, True

# Computed by hand from DeepSpeed's rule: (step is bad, scale after, hysteresis after).
WINDOW_3_HYSTERESIS_2 = [
    (GOOD, 16, 2),  # step 0: no good step since the initial overflow, which counts as step -1
    (GOOD, 16, 2),
    (GOOD, 16, 2),
    (GOOD, 32, 2),  # step 3: 3 - (-1) - 1 = 3 good steps, which is one window
    (BAD, 32, 1),  # absorbed by the hysteresis
    (BAD, 16, 1),  # not absorbed
    (BAD, 8, 1),  # the hysteresis stays used up until a window has passed
    (GOOD, 8, 1),  # step 7, last overflow at 6: 0 good steps
    (GOOD, 8, 1),
    (BAD, 4, 1),  # the window restarts
    (GOOD, 4, 1),
    (GOOD, 4, 1),
    (GOOD, 4, 1),
    (GOOD, 8, 2),  # step 13, last overflow at 9: 3 good steps; the hysteresis is restored
    (GOOD, 8, 2),
    (GOOD, 8, 2),
    (GOOD, 16, 2),  # 6 good steps, the second window
    (BAD, 16, 1),
]
WINDOW_3_CONSECUTIVE_3 = [
    (BAD, 16, 2),
    (BAD, 16, 1),
    (GOOD, 16, 3),  # one good step restores the hysteresis
    (BAD, 16, 2),
    (BAD, 16, 1),
    (BAD, 8, 1),
    (BAD, 4, 1),
    (GOOD, 4, 3),
]
HYSTERESIS_1 = [(BAD, 8, 1), (BAD, 4, 1), (GOOD, 4, 1), (GOOD, 8, 1), (GOOD, 16, 1)]


@pytest.mark.parametrize(
    ("settings", "table"),
    [
        (
            LossScaleSettings(initial_scale_power=4, loss_scale_window=3, hysteresis=2),
            WINDOW_3_HYSTERESIS_2,
        ),
        (
            LossScaleSettings(
                initial_scale_power=4,
                loss_scale_window=3,
                hysteresis=3,
                consecutive_hysteresis=True,
            ),
            WINDOW_3_CONSECUTIVE_3,
        ),
        (LossScaleSettings(initial_scale_power=4, loss_scale_window=1, hysteresis=1), HYSTERESIS_1),
    ],
)
def test_the_scale_moves_as_in_deepspeed(
    settings: LossScaleSettings, table: list[tuple[bool, int, int]]
) -> None:
    scaler = LossScaler(settings)
    seen = []
    for verdict, _, _ in table:
        scaler.update(verdict)
        seen.append((verdict, int(scaler.scale), scaler.cur_hysteresis))
    assert seen == table


def test_the_defaults_are_those_of_the_config() -> None:
    scaler = LossScaler()
    assert (scaler.scale, scaler.dynamic, scaler.cur_hysteresis) == (65536.0, True, 2)


def test_the_minimum_is_reached_exactly_and_then_an_error_is_raised() -> None:
    scaler = LossScaler(LossScaleSettings(initial_scale_power=2, hysteresis=1, min_loss_scale=1.5))
    scaler.update(BAD)
    scaler.update(BAD)
    assert scaler.scale == 1.5
    before = scaler.state_dict()
    with pytest.raises(LossScaleError, match="Current loss scale already at minimum") as caught:
        scaler.update(BAD)
    assert "lower the learning rate" in caught.value.fix and scaler.state_dict() == before


def test_hysteresis_applies_at_the_minimum_too() -> None:
    scaler = LossScaler(LossScaleSettings(initial_scale_power=0, hysteresis=2))
    scaler.update(BAD)
    assert (scaler.scale, scaler.cur_hysteresis) == (1.0, 1)
    with pytest.raises(LossScaleError):
        scaler.update(BAD)


def test_a_static_scale_never_moves() -> None:
    scaler = LossScaler(LossScaleSettings(loss_scale=128))
    for verdict in (BAD, BAD, BAD, GOOD):
        scaler.update(verdict)
    assert (scaler.scale, scaler.dynamic) == (128.0, False) and LossScaler(
        LossScaleSettings(loss_scale=1.0)
    ).scale == 1.0


def test_each_overflow_is_logged_with_both_scales(capsys: pytest.CaptureFixture[str]) -> None:
    scaler = LossScaler(LossScaleSettings(initial_scale_power=3, hysteresis=2))
    scaler.update(BAD)
    scaler.update(BAD)
    lines = capsys.readouterr().err.splitlines()
    assert "stays at 8, hysteresis falls to 1" in lines[0] and "falls from 8 to 4" in lines[1]


@pytest.mark.parametrize("cut", range(1, len(WINDOW_3_HYSTERESIS_2)))
def test_a_loaded_scaler_continues_with_the_saved_state(cut: int) -> None:
    settings = LossScaleSettings(initial_scale_power=4, loss_scale_window=3, hysteresis=2)
    first, second = LossScaler(settings), LossScaler(settings)
    for verdict, _, _ in WINDOW_3_HYSTERESIS_2[:cut]:
        first.update(verdict)
    second.load_state_dict(first.state_dict())
    for verdict, scale, hysteresis in WINDOW_3_HYSTERESIS_2[cut:]:
        second.update(verdict)
        assert (second.scale, second.cur_hysteresis) == (scale, hysteresis)


def test_the_config_decides_between_static_and_dynamic_on_load() -> None:
    dynamic, static = (
        LossScaler(LossScaleSettings(initial_scale_power=4)),
        LossScaler(LossScaleSettings(loss_scale=8.0)),
    )
    saved_dynamic, saved_static = dynamic.state_dict(), static.state_dict()
    static.load_state_dict(saved_dynamic)
    dynamic.load_state_dict(saved_static)
    assert (static.scale, dynamic.scale) == (8.0, 16.0)


def test_a_minimum_raised_since_saving_is_respected() -> None:
    saved = {**LossScaler().state_dict(), "scale": 2.0}
    scaler = LossScaler(LossScaleSettings(min_loss_scale=4.0))
    scaler.load_state_dict(saved)
    assert scaler.scale == 4.0


def test_an_incomplete_state_is_refused_before_anything_changes() -> None:
    scaler = LossScaler()
    with pytest.raises(UsageError, match="lacks cur_iter, last_overflow_iter, cur_hysteresis"):
        scaler.load_state_dict({"dynamic": True, "scale": 1.0})
    assert scaler == LossScaler()


def test_a_first_scale_below_the_minimum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"below min_loss_scale 8\.0"):
        LossScaleSettings(initial_scale_power=2, min_loss_scale=8.0)

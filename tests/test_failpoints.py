"""engine/failpoints.py."""

from __future__ import annotations

import pytest

from engine import failpoints
from engine.failpoints import Failpoints


def test_off_by_default() -> None:
    points = Failpoints()
    assert not points.fires("die_at_load") and not points.fires("decline_start", 1)
    assert points.harm("token", range(1, 100)) == ""


def test_a_point_fires_at_its_count_and_once() -> None:
    points = Failpoints({"fault_at_token": 3, "stall_load": 1})
    assert [points.harm("token", [n]) for n in (1, 2, 3, 3)] == ["", "", "fault", ""]
    assert points.fires("stall_load") and not points.fires("stall_load")


def test_a_round_of_several_tokens_meets_the_point_inside_it() -> None:
    assert Failpoints({"die_at_token": 3}).harm("token", range(2, 5)) == "die"
    assert Failpoints({"die_at_token": 3}).harm("chunk", [3]) == ""


def test_a_misspelt_point_is_an_error() -> None:
    with pytest.raises(ValueError, match="die_at_lunch"):
        Failpoints({"die_at_lunch": 1})


def test_every_name_is_documented() -> None:
    assert failpoints.__doc__ is not None
    assert all(f"``{name}``" in failpoints.__doc__ for name in failpoints.NAMES)

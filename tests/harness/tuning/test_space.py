"""What is tried of a method: what it declares, and what the user names."""

from __future__ import annotations

import pytest

from harness.config.catalogue import entries
from harness.config.plugins import build
from harness.tuning.space import START, Space, SpaceError, grids_of, space_of
from methods.base import Method
from methods.snapkv import SnapKV


def no_refusal(method: Method) -> None:
    return None


def test_what_a_budget_or_model_refuses_is_left_out_and_an_error_where_it_was_asked_for() -> None:
    def refusal(method: Method) -> str | None:
        return "too wide" if isinstance(method, SnapKV) and method.window > 32 else None

    space = space_of(SnapKV(), grids_of(SnapKV(), {}), refusal, strict=False)
    assert space.grids["window"] == (8, 16, 32)
    assert space.left_out == ("window=64: too wide",)
    with pytest.raises(SpaceError, match="too wide"):
        space_of(SnapKV(), grids_of(SnapKV(), {"window": (16, 64)}), refusal, strict=True)


def test_points_hold_what_differs_from_the_start() -> None:
    space = Space(SnapKV(), {"window": (16, 32), "kernel": (7, 15, 31)}, ())
    assert space.curve("kernel") == [START, (("kernel", 15),), (("kernel", 31),)]
    both = (("window", 16), ("kernel", 31))
    assert both in space.combinations(space.grids)
    assert space.method(both) == SnapKV(window=16, kernel=31)
    assert space.distance(both) == (2, 3)
    assert space.label(both) == "window=16 kernel=31"


@pytest.mark.parametrize("entry", entries("method"), ids=lambda entry: entry.name)
def test_every_method_declares_values_that_it_takes(entry: object) -> None:
    method: Method = build(entry.values(), "method")  # type: ignore[attr-defined]
    if not method.tunable:
        with pytest.raises(SpaceError, match="declares no parameter"):
            grids_of(method, {})
        return
    space = space_of(method, grids_of(method, {}), no_refusal, strict=True)
    assert not space.left_out
    assert "dense_layers" not in space.grids

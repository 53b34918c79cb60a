"""Every field has a home in the installed Megatron, or a stated reason why not."""

import dataclasses

import pytest

from bridge import MixedPrecisionConfig
from bridge.sync.routes import ROUTES, routes_of
from bridge.sync.synchroniser import megatron_version


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in megatron_version().split(".")[:3])


@pytest.mark.parametrize("field", MixedPrecisionConfig.field_names())
def test_every_field_has_a_home_or_a_reason(field: str, megatron_owners) -> None:
    rows = routes_of(field)
    assert rows
    owners = megatron_owners()
    for row in rows:
        if row.attribute is None or row.owner == "process":
            assert row.note, "a field without an attribute says why"
            continue
        present = {f.name for f in dataclasses.fields(owners[row.owner])}
        since = tuple(int(part) for part in row.since.split("."))
        assert (row.attribute in present) == (version() >= since), f"{row.owner}.{row.attribute}"


def test_every_route_belongs_to_a_field_and_no_row_is_twice() -> None:
    assert {row.field for row in ROUTES} == set(MixedPrecisionConfig.field_names())
    places = [(row.owner, row.attribute) for row in ROUTES if row.attribute]
    assert len(places) == len(set(places))


def test_every_precision_field_of_megatron_that_shares_a_name_is_routed(megatron_owners) -> None:
    routed = {(row.owner, row.attribute) for row in ROUTES}
    for role, owner in megatron_owners().items():
        shared = {f.name for f in dataclasses.fields(owner)} & set(MixedPrecisionConfig.field_names())
        assert {(role, name) for name in shared} <= routed

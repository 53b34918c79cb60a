"""The types of the fields that rules read are those of the table of fields."""

import pytest

from bridge.model.section import NULLABLE_FIELDS
from bridge.precision.precision_config import FIELDS as PRECISION_FIELDS
from bridge.rules import owner_values
from bridge.target.fields import OWNER_FIELDS

CLASSES = {
    "model": owner_values.ModelValues,
    "optimizer": owner_values.OptimizerValues,
    "ddp": owner_values.DdpValues,
    "train": owner_values.TrainValues,
    "data": owner_values.DataValues,
    "peft": owner_values.PeftValues,
}
TYPES = {"bool": bool, "int": int, "float": float, "name": str, "dtype": str, "any": object}


def type_of(role: str, name: str) -> object:
    """Return the type of a field's values in one form."""
    row = OWNER_FIELDS[role][name]
    of_precision = PRECISION_FIELDS.get(name)
    can_be_none = row.default is None or row.kind in ("name", "dtype") or name in NULLABLE_FIELDS
    if of_precision is not None and of_precision.optional:
        can_be_none = True
    found = TYPES[row.kind]
    if found is object or not can_be_none:
        return found
    return found | None


@pytest.mark.parametrize("role", CLASSES)
def test_the_types_that_rules_read_are_those_of_the_fields(role: str) -> None:
    annotated = CLASSES[role].__annotations__
    assert annotated
    assert annotated == {name: type_of(role, name) for name in annotated}

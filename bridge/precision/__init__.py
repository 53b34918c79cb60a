"""The fields, formats and schemes of a precision. The other rooms read them. It imports no torch.

To add a field
    1. Declare it in `PrecisionConfig` (precision_config.py) with `stated(...)` and a docstring
       below it, which is its documentation. The options of `stated` are the attributes of
       `StatedField` (stated_field.py): the kind of its values, its subject, the family and the
       schemes that it acts in, whether a schedule may change it, and Megatron-LM's option.
    2. Add its route to the configs of Megatron in ``bridge/sync/field_routes.py``, with a note in
       ``bridge/sync/route_notes.yaml``. ``tests/sync/test_field_routes.py`` names what is missing.
    3. Run ``scripts/write_reference.py``, which writes the reference pages.

To add a number format or a scaling scheme
    1. Add a row to formats.py or schemes.py.
    2. Add its quantiser to ``bridge/runtime/numerics/``.

The config
    precision_config.py `PrecisionConfig`: every field with its meaning
    stated_field.py     `StatedField`: a field that records whether it was stated
    statements.py       `Statements`: the fields that were stated, and their sources
    coercion.py         the form in which values are stored
    subjects.py         the fields by subject, and the outcome of a change on resume
    field_docstrings.py the docstring of each field
    mode.py             mode and scheme of a precision, and its label
    yaml_text.py        a precision as YAML text, and back
    strict_yaml.py      YAML as plain data, of limited size
    package_yaml.py     YAML files of the package itself
    owners.py           the configs that a sync writes into, for type checkers

Formats and schemes
    formats.py          number formats as rows
    schemes.py          scaling schemes as rows
    operand_copies.py   the formats and scales of both copies of each operand
    quantizer_factories.py  Transformer Engine's quantizer factories as rows
    debug_features.py   a features file of Transformer Engine's debugger

Single modules
    row_normalisation.py  the list `modules`, normalised and checked
    module_row.py       `ModuleRow`: a row of `modules`, select -> precision
    linear_names.py     the linear layers of Megatron's models, by name
    matchers.py         `Matcher`: globs over module names with a `ModulePrecision`
    module_schemes.py   the scheme of each linear layer by its number
    foreign_names.py    names of linear layers in other libraries

    grouping.py         a list of pairs as a dictionary of lists

`bridge.registry.mixed_precision_config.MixedPrecisionConfig` is the public class.
"""

"""The parts of a precision. No torch on import.

To add a field
    1. Declare it in `PrecisionConfig` (config.py) with `stated(...)` and one sentence below it. The
       options of `stated` are the attributes of `StatedField` (fields.py): the kind of its values,
       its subject, the family and the schemes that it acts in, and Megatron-LM's option.
    2. Add its route to the configs of Megatron in ``bridge/sync/routes.py``.
    3. Run ``scripts/write_reference.py``.

To add a number format or a scaling scheme, add a row to formats.py or schemes.py.

The config
    config.py           `PrecisionConfig`: every field with its meaning
    fields.py           `StatedField`: a field that knows whether it was set
    statements.py       `Statements`: the fields that were set, and their sources
    values.py           the form in which values are kept
    subjects.py         the fields by subject, and the outcome of a change on resume
    field_docs.py       the sentence below each field
    mode.py             mode and scheme of a precision, and its name in words
    yaml_text.py        a precision as YAML text, and back
    strict_yaml.py      YAML as plain data, bounded
    owners.py           the configs that a sync writes into, for type checkers

Formats and schemes
    formats.py          number formats as rows
    schemes.py          scaling schemes as rows
    copies.py           the formats and scales of both copies of each operand
    factories.py        Transformer Engine's quantizer factories as rows

Single modules
    modules.py          `ModuleRow`: a row of `modules`, select -> precision
    matchers.py         `Matcher`: globs over module names with their `Effect`
    module_schemes.py   the scheme of each linear layer by its number
    foreign_names.py    names of linear layers in other libraries

    grouping.py         a list of pairs as a dictionary of lists

`bridge.registry.config.MixedPrecisionConfig` is the public class on top.

To add a field of the precision:

- a line in config.py: its kind, subject, family and schemes, whether a schedule may change it, and
  Megatron-LM's flag. The string below the line is its documentation;
- its route in `bridge/sync/routes.py`, with a note in `routes.yaml`;
- `scripts/write_reference.py` writes the reference pages, and `tests/sync/test_routes.py` names what
  is missing.

A scaling scheme is a row of schemes.py and a number format a row of formats.py; both need a quantiser
in `bridge/runtime/numerics/`.
"""

"""The parts of a precision. No torch on import.

    PrecisionConfig    every field as a row: kind, subject, family, flag      config.py, over
      StatedField        a field that knows whether it was set                fields.py; values.py
      Statements         what was set, and by which source; its readers       statements.py
    mode_of, label_of  mode and scheme of a precision; its name in words      mode.py
    to_yaml            a precision as YAML text, and back                     yaml_text.py
    ModelOwner         the configs that a sync writes into, for type checks   owners.py
    FORMATS, SCHEMES   number formats and scaling schemes as rows             formats.py, schemes.py
    ModuleRow          a row of `modules`: select -> precision                modules.py
      Matcher            globs over module names with their `Effect`          matchers.py
      ModuleSchemes      the scheme of each linear layer by its number        module_schemes.py
      names              of linear layers in other libraries                  foreign_names.py
    Subject            the fields by subject, and a change on resume          subjects.py
    field_docs         the sentence below each field                          field_docs.py
    load_all           YAML as plain data, bounded                            strict_yaml.py

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

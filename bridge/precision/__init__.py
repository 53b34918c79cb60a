"""The parts of a precision. No torch on import.

    PrecisionConfig    every field as a row: kind, subject, family, flag      config.py, over
      StatedField        a field that knows whether it was set                fields.py
      Statements         what was set, and by which source                    fields.py; values.py
    FORMATS, SCHEMES   number formats and scaling schemes as rows             formats.py, schemes.py
    ModuleRow          a row of `modules`: select -> precision                modules.py
      Matcher            globs over module names with their `Effect`          matchers.py: Megatron's per-module recipe
      ModuleSchemes      the scheme of each linear layer by its number        module_schemes.py
      names              of linear layers in other libraries                  foreign_names.py
    Subject            the fields by subject, and a change on resume          subjects.py
    field_docs         the sentence below each field                          field_docs.py
    load_all           YAML as plain data, bounded                            strict_yaml.py

`bridge.registry.config.MixedPrecisionConfig` is the public class on top.
"""

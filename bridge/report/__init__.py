"""Tables, plots and pages: shows values that other rooms compute.

Each function takes a finished value from the room that made it, and returns text, a table or a
picture. No function reads a file or decides anything.

    value                             made by                   shown by
    Report of findings                preflight.rule_check      findings.py: lines, data; sarif.py
    PrecisionPlan, MemoryReport, ...  plan                      plan/: tables, CSV, a picture
    SyncReport                        sync                      sync_table.py: plain text
    Comparison, RecipeRow             compare.comparison        comparison.py, comparison_picture.py
    Band                              compare.band              gradient_band.py
    QuantisationRow                   audit.quantisation        quantisation_table.py,
                                                                quantisation_picture.py
    RunFolder                         audit.run_folder          watch.py; html/: RunContent, a page
    RunLog                            audit.run_log             log_content.py: a view, a RunContent
    Contents, Difference              checkpoint.contents       checkpoint_table.py
    RoundTrip                         numerics.round_trip       round_trip_table.py

`table.py` lays out columns and rows for a terminal or a file, and every table uses it. `curves.py`
has the loss curves, and `make_figure`, with which every picture begins.
"""

"""Tables, plots and pages: renders values made elsewhere, computes nothing.

A function takes a finished value of a room below and returns something to show; none reads a file
or decides.

    value                             made by                   shown by
    Report of findings                preflight.check           findings.py: lines, data; sarif.py
    PrecisionPlan, PlanDifference     plan.precision_plan       plan_table.py, plan_picture.py
    MemoryReport, FitReport           plan.memory_report, .fit  memory_table.py
    AlignmentReport                   plan.alignment            alignment_table.py
    ModuleSelection                   plan.selection            module_table.py
    SyncReport                        sync                      sync_table.py: plain text
    Comparison, RecipeRow             compare.comparison        comparison.py: table, files, picture
    Band                              compare.band              gradient_band.py
    QuantisationRow                   audit.quantisation        quantisation_table.py: tables, a heat map
    RunFolder                         audit.run_folder          watch.py; html/: RunContent, then the page
    RunLog                            audit.run_log             log_content.py: a view, a RunContent
    Contents, Difference, RoundTrip   checkpoint, numerics      checkpoint_table.py

`table.py` lays columns and rows out for a terminal or a file, and every table goes through it.
`curves.py` has the loss curves and the empty figure that every picture begins with.
"""

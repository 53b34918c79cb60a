"""`precision-bridge plan`: the formats that a run computes and stores in.

command.py          the arguments, and the choice of a form
table.py            the plan of a run as a table or JSON, with the phases of its schedule
shares.py           the plans of several files: a line for each run
csv_rows.py         ``--csv``
picture.py          ``--picture``
difference.py       ``--against``: another recipe or file
alignment.py        ``--align``: the dimensions of each GEMM
modules.py          ``--modules``: the modules that each row of `modules` selects
debug_features.py   ``--write-debug-features``: a file for Transformer Engine's debugger
first_phase.py      the plan of a run whose schedule has several phases
"""

"""The answers about a planned run as tables, CSV and pictures.

plan_table.py        the formats of each layer (PrecisionPlan); plan_csv.py, the same as CSV
plan_difference.py   the cells in which two plans differ (PlanDifference)
plan_picture.py      the formats as a picture
module_table.py      the modules that each row of `modules` selects (ModuleSelection)
alignment_table.py   the dimensions of a rank's GEMMs (AlignmentReport)
memory_table.py      the memory of a rank (MemoryReport)
fit_table.py         the changes with which a run fits into its GPUs (FitReport)
"""

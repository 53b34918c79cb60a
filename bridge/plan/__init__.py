"""The plan of a run: the formats of its tensors, and the answers that follow from them.

A plan has the formats in which each layer computes, keeps, sends and saves its tensors.

    PlanSettings        the values after the sync that decide a format     plan_settings.py
    Module              a module of a layer with its sizes                 bridge/model/modules.py
    PlanRow             the format of a GEMM or of a tensor                plan_rows.py
    PlanLayer           a layer with the rows of its modules               plan_layers.py
    PrecisionPlan       the layers of a run, and their rows                precision_plan.py
      ModuleSelection   the modules that each row of `modules` selects     selection.py
      AlignmentReport   the sizes of each GEMM that its scheme refuses     alignment.py
      MemoryReport      the bytes of a rank of each pipeline stage         memory_report.py, memory_*.py
    Workload            the tokens of a rank, and recomputed parts         workload.py
    PlannedRun          the plan, the workload and the memory of a run     planned_run.py
    fit                 the changes with which a run fits into its GPUs    fit.py

`make_plan` makes the plan of a prediction (`bridge.sync`). `precision_plan` makes the plan of a
precision and config objects. Both read only config values, without Megatron.
"""

"""The plan of a run: the formats of its tensors, and the answers that follow from them.

A plan has the formats in which each layer computes, keeps, sends and saves its tensors.

    Settings            the values after the sync that decide a format     settings.py
    Module              a module of a layer with its sizes                 bridge/model/modules.py
    PrecisionPlan       layer x module x GEMM or tensor -> PlanRow         precision_plan.py rows.py
      ModuleSelection   the modules that each row of `modules` takes       selection.py
      AlignmentReport   the sizes of each GEMM that its scheme refuses     alignment.py
      MemoryReport      the bytes of a rank of each pipeline stage         memory.py, memory_*.py
    Workload            tokens of a rank, recomputed parts                 workload.py
    PlannedRun          plan, workload and memory of a run                 run.py
    fit                 the changes with which a run fits into its GPUs    fit.py

`plan_of` makes the plan of a prediction (`bridge.sync`), `precision_plan` that of a precision and
config objects. Both read config values alone, without Megatron.
"""

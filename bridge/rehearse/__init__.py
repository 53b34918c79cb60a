"""`precision-bridge rehearse`: a small copy of a run, trained by Megatron's classes on this CPU.

    shrink.py            `shrink`: makes the `SmallRun`, without Megatron
      layers.py            the layers that are kept
      widths.py            the widths: heads, channels, hidden size, experts
    small_run.py         `SmallRun`: the sections of the small run, each `Change` with its reason,
                         and the launches
    layout.py            `LaunchLayout`: the kinds of parallelism of a launch, each at size 2;
                         `LayerSplit`: the layers of two pipeline stages
    release.py           the release of Megatron Core that is imported
    rehearse.py          `rehearse`: starts the worker, and compares its records with the plan
    job.py               `Job` and `JobAnswer`: the JSON that `rehearse` and the worker exchange
    worker.py            the process that imports Megatron, and forks the ranks of each launch
    error_cause.py       `find_cause`: the settings in the condition that raised an error of
                         Megatron Core or Transformer Engine
    rehearsal.py         `Rehearsal`: the result, with a `LaunchResult` for each launch
    rehearsal_table.py   the result for people and as JSON

Only the worker process imports Megatron.
"""

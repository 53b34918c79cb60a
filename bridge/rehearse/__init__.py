"""`precision-bridge rehearse`: a run, shrunk, in Megatron's real classes on this machine's CPU.

    SmallRun       model, optimizer, ddp and train of a run, made small, with each `Change` and its
                   reason, the kept layers, and the launches that together have the run's layout
      Round        a launch of a few processes: kinds of parallelism of the run, each at size 2
      Split          how the layers are shared by two pipeline stages
    find_cause     the settings in the condition that raised an error of Megatron Core or
                   Transformer Engine
    Rehearsal      the answer: values kept, shrunk and left out, `Launched` rounds, verdict

`shrink` (layers.py, widths.py) makes the `SmallRun` without Megatron. `rehearse` hands it to a
process of its own, worker.py, as JSON: that one imports Megatron once and forks each round's ranks,
which train, save and resume. `rehearse` then compares their records with the plan of the small run.
rehearsal_table.py shows the result.
"""

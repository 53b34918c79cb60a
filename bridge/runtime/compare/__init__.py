"""Comparison of finished runs: twins, and the gap between their losses. It imports no torch.

    arm.py              `Arm`: one finished run with its precision, other fields, seed and loss
    gap.py              `LossCurve` of a run; `Gap` of a recipe, and the verdict on it
    comparison.py       `Comparison` of twins: runs with equal fields except precision and seeds
    log_comparison.py   `compare_logs`: the same for runs that are known only by a log
      logged_run.py       `LoggedRun`: the log of a run, and its arm
      log_notes.py        sentences about what the logs do not show
    band.py             `Band`: the error of each GEMM between two precisions, and its bound
    proposal.py         `Proposal`: a module that another precision suits better

`front/compare.py` compares the runs of a sweep, and `cli/compare/` finished runs and logs.
"""

"""Comparison of finished runs: the twins, and the gap between their losses. Imports no torch.

    Arm            one finished run, of its folder or its log: precision, the rest, seed, curve
    Curve          its training loss over the steps (gap.py)
    Comparison     twins: runs equal in every field but those of precision and the seeds
      RecipeRow      all seeds of one recipe
        Gap            its loss against the baseline's: within, outside or cannot tell
          GapCurve       the same over the steps, for the picture
    Band           one batch in two precisions: `BandRow` per GEMM, its error and its bound
    Proposal       a module whose operands lost more than a bit, and the precision that suits it

`front.compare` reads the arms of a sweep and judges them. `cli.compare` judges the arms of finished
runs, and through `logs.py` runs of logs: `logged_run.py` makes arms of logs, and `log_notes.py`
writes what stays unknown of them. `training.passes` makes the errors of a band, and
`cli.quantisation_error` proposes rows of `modules`. `report.comparison` and `report.gradients` show
the answers.
"""

"""`precision-bridge explain`: a field, a rule, or a setting in a run.

command.py   the arguments, and the choice of an explanation
rule.py      a rule in full
field.py     a field of the precision: meaning, configs, value in a recipe
in_file.py   a setting in the run that a file describes
in_run.py    a setting in a run of ours, by the files of its folder
in_log.py    a setting in the log of another trainer's run
"""

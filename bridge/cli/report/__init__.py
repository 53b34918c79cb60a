"""`precision-bridge report`: the report on some runs, and the view of a run in progress.

command.py       the arguments, and the choice of a form
page.py          the report as HTML, Markdown or JSON
run_contents.py  the content of the report on each run
watch.py         ``--watch``: the view of a run in progress
watched_run.py   `WatchedRun`: a run folder or a log, as its files show it now
"""

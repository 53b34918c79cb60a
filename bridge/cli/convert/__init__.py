"""`precision-bridge convert`: a precision of one system, written for another.

command.py         the arguments, and the stages of a conversion
context.py         the facts of ``--context``
converted_run.py   `ConvertedRun`: a run as it was read and as it was written
report.py          the report on a conversion as text
payload.py         `Payload`: the text that is written, and its further files
"""

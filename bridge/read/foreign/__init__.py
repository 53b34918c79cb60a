"""Foreign systems: how a precision of one is read and written, whatever the system.

system.py          `System`, the pair of functions; reports.py, their results; payload_text.py, a
result as the text of a file
import_builder.py  builds the report of an import; export_builder.py, of an export
table.py           applies the facts of rows/SYSTEM.yaml: setting_row.py, sentence.py and
document_signs.py say what its rows have; row_files.py loads them
effective_fields.py   compares precisions; semantics.py names the computation of a mode
amp.py             autocast over FP32 weights
"""

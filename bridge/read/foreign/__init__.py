"""Foreign systems: how a precision of one is read and written, whatever the system.

system.py          `System`, the pair of functions; reports.py, their results
import_builder.py  builds the report of an import; export_builder.py, of an export
table.py           applies the facts of rows/SYSTEM.yaml: setting_row.py, sentence.py and
document_signs.py say what its rows have; row_files.py loads them
meaning.py         compares precisions; amp.py has autocast over FP32 weights
"""

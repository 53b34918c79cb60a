"""Reads and writes the precision in the configurations of other systems, such as DeepSpeed.

system.py            `System`: a pair of functions that read and write a configuration
reports.py           the results of the two functions: `ImportReport` and `ExportReport`
import_builder.py    builds the report of an import
export_builder.py    builds the report of an export
payload_text.py      the payload of an export as the text of a file

table.py             applies the table of a system, `foreign/tables/SYSTEM.yaml`
document_signs.py    the rows `recognised` of a table: signs of a file of the system
setting_row.py       the rows `settings` of a table: a setting, and the field that it becomes
sentence.py          a sentence about a setting that cannot be converted exactly
row_files.py         loads a file of `read/foreign/tables/`

effective_fields.py  the fields that have an effect, by which precisions are compared
semantics.py         names the computation that a mode means
amp.py               autocast over FP32 weights
"""

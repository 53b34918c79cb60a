"""Megatron Core's per-module recipe, the content of a file for `--te-precision-config-file`.

precision_file.py     finds the file that a run names
te_precision_file.py  reads a file, and refuses faults that stop Megatron
stage_files.py        writes the files that an export needs, one for each pipeline stage if they differ
"""

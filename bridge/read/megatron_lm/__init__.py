"""Megatron-LM: its arguments, from launch scripts, argument files, logs and checkpoints.

recognition.py         whether a document or a launch is Megatron-LM's
printed.py             arguments that a run printed into a log
arguments.py           the options of a run as they are written
flags.py               the parser's options: switches, fields, spellings; their rows are those of
                       bridge/read/rows/megatron_lm.yaml
refused.py             words of a command line that the parser refuses
unread.py              options that nothing here reads, and the settings that they may change
argument_values.py     the options by the names that Megatron-LM's code has for them
sections.py            the sections of a run that they become
elsewhere.py           what decides besides the arguments: files, modules, an engine
engine.py              DeepSpeed's engine, and its JSON: engine_file.py
precision_file.py      the per-module recipe that a run names, read by te_precision_file.py
start.py               values that Megatron-LM sets when a run starts
run.py                 a file as a run: what `check`, `plan` and `memory` read
file_run.py            a run of a file, and the runs of a file
model_kind.py          models that are no language model
open_points.py         what a file leaves open, as sentences
importer.py            a file as a precision: what `convert` reads
gradient_reduction.py  the dtype in which gradients are reduced
effects.py             defaults that decide, and settings without effect
exporter.py            a recipe as arguments, with files for its modules: stage_files.py
"""

"""Readers of files that describe a run or a precision, whatever program wrote them.

run_file.py         `read_file`, a run of any framework, by the reader of its framework:
                    framework/ megatron_bridge/ megatron_lm/
set_at_start.py     values that a framework sets when the run starts; start.py, their rows
refusals.py         files that are not read, each refused in a sentence
system.py           `System`, a pair of functions that read and write a precision; its table is
                    table.py over rows/, and its results are reports.py
framework_signs.py  whose file or launch it is; system_signs.py, for systems of `convert`
command_lines.py    launches of programs that are not Megatron-LM's
launch/             launch scripts; text/, documents and their settings
nemo/, deepspeed.py, amp.py    systems
"""

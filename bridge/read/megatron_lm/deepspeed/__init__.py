"""DeepSpeed's engine in a run of Megatron-DeepSpeed: its JSON, and the settings that it decides.

engine_file.py  the JSON that a run names
engine.py       the settings of the run that the engine decides
"""

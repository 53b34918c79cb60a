"""The shape of a model: kinds and sizes of its layers (`model`), and where they are placed (`parallel`).

It is read once, from config values alone, and asked by rules, plan, memory, alignment and rehearsal.
"""

"""The checks before a GPU is held.

    declare        a GPU for a process that runs on the CPU                       te_cpu.py
    Setup          a whole run as rules see it, after the sync                    check.py
    check          every rule asked about it -> Report: findings, exit code       check.py
    resolve_auto   `auto`: a recipe by target and model -> Choice                 auto.py
    support        whether a target runs a recipe; `matrix` of all of them        auto.py

`check_run` makes the setup of a container, or of the sections of a file. The rules themselves are in `bridge.rules`.
"""

"""The checks before a GPU is held.

    Run            a run before it starts: sections, precision, target, sources    run.py
      Origins        the sources that set each key                                 origins.py
      FileReading    what its file says besides its sections                       file_reading.py
      Problems       the faults found while it is read                             problems.py
    CheckContext   the run as rules see it, after the sync                         context.py
    check          every rule asked about it -> Report: findings, exit code        check.py
    last_sync      the sync that a run begins after                                last_sync.py
    resolve_auto   `auto`: a recipe by target and model -> Choice                  auto.py
    support        whether a target runs a recipe; `matrix` of all of them         auto.py
    declare        a GPU for a process that runs on the CPU                        declared_gpu.py

The rules themselves are in `bridge.rules`.
"""

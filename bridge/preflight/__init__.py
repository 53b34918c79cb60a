"""The checks before a GPU is held.

    Run                a run before it starts: sections, precision, target, origins      run.py
      Origins            the sources that set each key                                   origins.py
      Deciders           the deciders of values that are assumed or open                 deciders.py
      Problems           the faults found while a run is read                            problems.py
    FileReading        the facts of a run's file besides its sections                    file_reading.py
      MegatronRelease    the release of Megatron Core, and the reason for it             megatron_release.py
      Uncertainty        the settings that the file does not decide                      uncertainty.py
      Launches           the runs of the file                                            launches.py
    RunChoice          the run of a file that the caller asks for                        run_choice.py
    check              every rule evaluated about a run -> Report                        rule_check.py
      CheckContext       the run after the sync, as rules read it                        check_context.py
      silence.py         the rules that a run leaves out, and their reasons
    apply_last_sync    the last sync before a run begins                                 last_sync.py
    resolve_auto       `auto`: the recipe for a target and a model -> Choice             auto_recipe.py
    check_support      whether a target runs a recipe -> Support                         recipe_support.py
    declare            the GPU whose branches Transformer Engine takes on the CPU        gpu_for_te_cpu.py

The rules themselves are in `bridge.rules`.
"""

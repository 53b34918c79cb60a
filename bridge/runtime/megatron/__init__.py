"""The only room that imports megatron.core or transformer_engine at run time.

Importing it imports `megatron.core` once, without its warnings about optional packages (Apex,
Transformer Engine, a CUDA tool chain). It changes no attribute of Megatron, torch or logging. The
module that needs a missing package reports it. `training_process` replaces the attributes that a
run needs, for the length of the run. In a process that was declared for it
(`bridge.preflight.gpu_for_te_cpu`), Transformer Engine's Python is imported first, over a stand-in
for its compiled part.

In the order in which a run needs them:

    process/           `training_process`: ranks, groups, seeds; a `Process`
    cpu/               Megatron on a machine without CUDA
    backend.py         `choose_backend`: te, te_cpu, emulated or local linear layers
    model/             `GPTConfig` -> `build_gpt`: the model's chunks
      attention/         attention without Transformer Engine
      hybrid/            Mamba layers, and torch code for packages that are not installed
      emulation/         emulated FP8 and FP4 linear layers, stored weights
      te/, te_cpu/       Transformer Engine's requirements; its Python on a CPU
      without_te.py      repairs of layers where Transformer Engine is not installed
    optimizer.py       Megatron's optimizer and schedule, with corrections
    data/              the corpus, and the batches of a rank
    trainer.py         `Trainer`: model, optimizer and schedule -> `StepResult` of a step
    checkpoint/        the state of a run, saved and loaded
    record/            the record of a run, read from live objects
    one_batch.py       GEMMs of one batch in two precisions, compared
    patching.py        functions that replace attributes of other packages
    deferred_configs.py
                       Megatron's optimizer and DDP configs, with checks that wait

`training` makes all of them for a run.
"""

import warnings

from bridge.preflight.gpu_for_te_cpu import get_declared_capability
from bridge.runtime.megatron.process.quiet_loggers import quiet_loggers

_capability = get_declared_capability()
if _capability is not None:
    from bridge.runtime.megatron.te_cpu.install import install_te

    install_te(_capability)

with warnings.catch_warnings(), quiet_loggers():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401 imported once, without its warnings

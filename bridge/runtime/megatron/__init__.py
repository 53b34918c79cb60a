"""The only room that imports megatron.core or transformer_engine at run time.

Importing it imports `megatron.core` once, without its warnings about optional packages (Apex,
Transformer Engine, a CUDA tool chain), and changes nothing of it, of torch or of logging. The
module that would have used a missing package reports it where it matters. What a run needs is
replaced by `training_process`, for its length. In a process that was declared for it
(`bridge.preflight.declared_gpu`), Transformer Engine's Python is imported first, over a stand-in.

    Process          this process among the ranks, set up and taken down by `training_process`:
                     device shim, `Peers`, groups, seeds, `StopRequest`
    Backend          implementation of the linear layers: te, te_cpu, emulated or local;
                     `choose_backend`, then `running`
    GPTConfig        the model's config -> `build_gpt`: chunks of `GPTModel` by layer_spec.py,
                     weights by their place
      emulation/       emulated linear layers, `StoredWeight`, `DelayedUpdates`
      te/, te_cpu/     Transformer Engine's requirements, quantizers per layer; its Python over
                       torch code
    Corpus, Splits   the data: documents on disk, samples of a run -> `batches`
    Trainer          model, optimizer and schedule -> `StepResult` of a step
    Position         how far a run has come; checkpoint/ saves and loads the state
    record/          what ran, read from live objects: census, copies, telemetry, first gradient
                     that is not finite
    replaced         attributes of torch, Megatron or Transformer Engine have other values for a
                     while, or for good

`training` makes all of them for a run. Rooms below this one read the files of a run alone.
"""

import warnings

from bridge.preflight.declared_gpu import get_declared_capability
from bridge.runtime.megatron.quiet_loggers import quiet_loggers

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

"""The only room that imports megatron.core or transformer_engine at run time.

Importing it imports `megatron.core` once, without its warnings about optional packages (Apex, Transformer Engine, a
CUDA tool chain). The module that would have used a missing package reports it where it matters. In a process that was
declared for it (`bridge.preflight.te_cpu`), Transformer Engine's Python is imported first, over a stand-in.

    Process          this process among the ranks, set up and taken down by `training_process`: device shim, `Peers`,
                     groups, seeds, `StopRequest`
    Backend          who runs the linear layers: te, te_cpu, emulated or local; `choose_backend`, then `running`
    GPTConfig        the model's config -> `build_gpt`: chunks of `GPTModel` by layer_spec.py, weights by their place
      emulation/       emulated linear layers, `StoredWeight`, `DelayedUpdates`
      te/, te_cpu/     Transformer Engine's requirements, quantizers per layer; its Python over torch code
    Corpus, Splits   the data: documents on disk, samples of a run -> `batches`
    Trainer          model, optimizer and schedule -> `StepResult` of one step
    Position         how far a run has come; checkpoint/ saves and loads the state
    record/          what ran, read from live objects: census, copies, telemetry, first gradient that is not finite
    replaced         attributes of torch, Megatron or Transformer Engine have other values for a while, or for good

`training` makes all of them for a run; rooms below know only what they leave in the files of one.
"""

import logging
import warnings
from contextlib import nullcontext
from unittest.mock import patch

import torch

from bridge.megatron.device import has_cuda
from bridge.preflight.te_cpu import declared

_QUIET = {
    "megatron": logging.WARNING,  # at INFO it prints whole configs
    "megatron.core.models.gpt.gpt_model": logging.ERROR,  # 0.19 announces HybridModel at every construction
    "megatron.core.tensor_parallel.random": logging.ERROR,  # fires at each RNG fork where the CPU has the one generator
    "megatron.core.dist_checkpointing.strategies.torch": logging.ERROR,  # 0.19: on asynchronous saving, not used here
    "torch.utils.cpp_extension": logging.ERROR,  # 0.17 and later make it report a missing CUDA at import
}
for _name, _level in _QUIET.items():
    _logger = logging.getLogger(_name)
    if _logger.level == logging.NOTSET:
        _logger.setLevel(_level)

_capability = declared()
if _capability is not None:
    from bridge.megatron.te_cpu.install import install

    install(_capability)

# Without CUDA nothing is compiled: torch's compiler alone would take 45 MiB, and a C++ compiler seconds per function.
with (
    warnings.catch_warnings(),
    nullcontext() if has_cuda() else patch.object(torch, "compile", lambda function: function),
):
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel

    from bridge.megatron.hybrid.kernels import import_layers

    if not has_cuda():
        megatron.core.jit.disable_jit_fuser()  # of layers that are imported now, also where another program began
    import_layers()
    import megatron.core.models.mamba.mamba_layer_specs

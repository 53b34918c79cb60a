"""Parameters of a live model with DeepSeek-V4's hybrid attention.

``python -m tests.runtime.megatron.compressed_live MODEL.json`` reads the fields of the model, and
writes ``parameters.json`` beside the file: name of a parameter -> its shape and dtype. Transformer
Engine's Python builds the layers on a CPU, since the attention asks for its linear layers.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from bridge.preflight.gpu_for_te_cpu import declare

VOCABULARY = 256


def main(path: Path) -> None:
    """Build the model and write its parameters."""
    warnings.simplefilter("ignore")
    declare("b200")
    from bridge.runtime.megatron.process.training_process import training_process

    fields = json.loads(path.read_text())
    import torch
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = MLATransformerConfig(**fields, bf16=True, params_dtype=torch.bfloat16)
    with training_process(config, seed=1):
        model = Float16Module(config, _model(config))
        found = {name: [list(one.shape), str(one.dtype)] for name, one in model.module.named_parameters()}
    path.with_name("parameters.json").write_text(json.dumps(found))


def _model(config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = get_transformer_block_with_experimental_attention_variant_spec(config)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        mtp_block_spec=mtp,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

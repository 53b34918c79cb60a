"""Runs that break and that keep the rules of `bridge.rules.topics.model.alignment`."""

from tests.rules.cases.runs import BLOCKWISE, CURRENT, CURRENT_ALL, DENSE, H100, HYBRID, full, run

SPLIT = dict(DENSE, seq_length=4096, tensor_model_parallel_size=4, sequence_parallel=True, context_parallel_size=2)
PACKED = {"seq_length": 4096, "enable_offline_packing": True}
MAMBA = dict(HYBRID, hybrid_layer_pattern="M" * DENSE["num_layers"])

CASES = {
    "PB501": (
        full(CURRENT, H100, dict(DENSE, seq_length=1000), train={"micro_batch_size": 1}),
        full(CURRENT, H100, dict(DENSE, seq_length=1024), train={"micro_batch_size": 1}),
    ),
    "PB502": (
        full(CURRENT, H100, dict(DENSE, ffn_hidden_size=11000)),
        full(CURRENT, H100, dict(DENSE, ffn_hidden_size=11008)),
    ),
    "PB503": (
        run(
            BLOCKWISE,
            H100,
            model=dict(
                DENSE,
                ffn_hidden_size=11008,
                tensor_model_parallel_size=8,
                num_query_groups=8,
                hidden_size=16384,
                num_attention_heads=128,
            ),
        ),
        run(
            BLOCKWISE,
            H100,
            model=dict(
                DENSE, ffn_hidden_size=16384, tensor_model_parallel_size=8, hidden_size=16384, num_attention_heads=128
            ),
        ),
    ),
    "PB505": (
        full(CURRENT_ALL, H100, dict(MAMBA, mamba_num_heads=130)),
        full(CURRENT_ALL, H100, dict(MAMBA, mamba_num_heads=128)),
    ),
    "PB506": (
        full(CURRENT, H100, dict(DENSE, hidden_size=1024, num_attention_heads=8, ffn_hidden_size=4096)),
        full(CURRENT, H100, DENSE),
    ),
    "PB507": (
        full(CURRENT, H100, SPLIT, data=PACKED, train={"micro_batch_size": 1}),
        full(
            CURRENT,
            H100,
            SPLIT,
            data=dict(PACKED, dataset_kwargs={"pad_seq_length_to_mult": 128}),
            train={"micro_batch_size": 1},
        ),
    ),
}

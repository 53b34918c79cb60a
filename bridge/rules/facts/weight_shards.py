"""`format_unsharding_settings`: the settings that shard weights only for tensor parallelism."""

from bridge.rules.run_context import RunContext


def format_unsharding_settings(context: RunContext) -> str:
    """Return the settings that turn further sharding off, joined by "and", or "" if it is off.

    Megatron's generalised tensor parallelism shards a weight further than tensor parallelism, and
    gathers it when it is used. Its number of shards includes the shards of tensor parallelism.
    """
    model, ranks = context.model, context.parallel
    shards = model.tensor_parallel_num_weight_shards
    expert_shards = model.expert_tensor_parallel_num_weight_shards
    settings = []
    if (shards or ranks.tensor) > ranks.tensor:
        settings.append(f"model.tensor_parallel_num_weight_shards={ranks.tensor}")
    if (expert_shards or ranks.expert_tensor) > ranks.expert_tensor:
        settings.append(f"model.expert_tensor_parallel_num_weight_shards={ranks.expert_tensor}")
    if (model.gtp_weight_remat_size or 1) > 1:
        settings.append("model.gtp_weight_remat_size=1")
    if (model.expert_gtp_weight_remat_size or 1) > 1:
        settings.append("model.expert_gtp_weight_remat_size=1")
    return " and ".join(settings)

"""Plain PyTorch's own pieces: autocast and the scaler, FSDP policies, torchao."""

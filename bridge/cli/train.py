"""`precision-bridge train [OVERRIDES]`: training as in `scripts/train.py`, in Hydra's words."""


def run_hydra_arguments(words: list[str]) -> None:
    """Train as the words say, and end the process with an exit code where that fails."""
    from bridge.front.train import main_train  # Hydra is heavy

    main_train(words)

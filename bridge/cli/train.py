"""`precision-bridge train [OVERRIDES]`: trains like `scripts/train.py`, with Hydra's arguments."""


def run_hydra_arguments(words: list[str]) -> None:
    """Train with the overrides of a command line. A failure ends the process with an exit code."""
    from bridge.front.train import main_train  # Hydra is heavy

    main_train(words)

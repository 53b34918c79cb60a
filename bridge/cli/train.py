"""`precision-bridge train [OVERRIDES]`: training, as `scripts/train.py` does it. The words are Hydra's."""


def run_words(words: list[str]) -> None:
    """Train as the words say, and end the process with an exit code where that fails."""
    from bridge.front.train import main_train  # Hydra is heavy

    main_train(words)

"""Rules about the system of a run: GPU and releases, environment, framework, scripts/train.py."""

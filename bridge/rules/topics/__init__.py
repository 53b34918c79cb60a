"""The rules, by subject. `bridge.rules.rulebook` puts the tables `RULES` of all modules together.

statements/   values and keys as they are written; a recipe against the configs
precision/    mode, loss scale, formats and schemes, layers and modules, stored weights
model/        attention, mixture of experts, residual stream, aligned sizes
training/     optimizer, gradients, FSDP, parallel layout, recomputation, determinism, checkpoints
system/       GPU and releases, environment, frameworks, and the builds of scripts/train.py

A new file needs a row in `TOPICS` of `bridge/rules/rulebook.py`.
"""

"""A module per topic, each with its table `RULES`; `bridge.preflight.rulebook` puts them together."""

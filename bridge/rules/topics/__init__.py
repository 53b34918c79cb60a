"""A module per topic, each with its table `RULES`; `bridge.rules.rulebook` puts them together."""

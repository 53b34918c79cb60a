"""Launch scripts: the parser, the reader in source order, and the launches of a script."""

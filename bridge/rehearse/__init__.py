"""`precision-bridge rehearse`: a run, shrunk, through Megatron's real classes on this machine's CPU."""

"""What a run of this project refuses: the fields, the refusals, and the rules that ask for them in a check."""

"""What can be known before a GPU is held: rules over a setup and a declared target, and what follows from shapes."""

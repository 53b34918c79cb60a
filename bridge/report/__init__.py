"""Tables, plots and pages: renders values made elsewhere, computes nothing."""

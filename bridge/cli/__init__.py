"""The command line `precision-bridge`."""

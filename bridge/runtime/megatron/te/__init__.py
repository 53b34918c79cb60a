"""Transformer Engine on a GPU: its requirements on a machine, and its quantizers per layer.

    machine.py   the requirements that a machine does not meet
    layers.py    factories that choose the quantizers of each linear layer

Neither file needs Transformer Engine before one of its functions is called.
"""

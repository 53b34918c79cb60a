"""The process of a run among its ranks: its setup, its agreement with other ranks, and its end.

    training_process.py   `training_process`: torch.distributed, Megatron's groups, seeds, threads
    agreement.py          every rank has the same settings; one rank computes a result for all
    peers.py              `Peers`: which rank ended or stalled, after a collective failed
    stop_request.py       `StopRequest`: Ctrl-C or SIGTERM ends the run between two steps
    memory.py             free memory goes back to the system; the peak of a run
    quiet_loggers.py      loggers of Megatron and torch whose lines no user can act on

The rooms that make or train a model get a `Process` and do not ask torch.distributed themselves.
"""

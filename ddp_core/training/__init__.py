"""The training that runs inside each rank: ``python -m ddp_core.training`` under torchrun.

Importing this package is cheap; torch comes in with its modules. :mod:`~ddp_core.training.loop`
is the place to start reading.
"""

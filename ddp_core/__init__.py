"""Launch, watch and explain PyTorch DistributedDataParallel runs.

Importing this package is cheap: torch is imported by :mod:`ddp_core.training` only, and
Streamlit by ``dashboard`` only.
"""

__version__ = "0.1.0"

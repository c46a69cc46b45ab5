"""RunConfig: the one schema behind the launch form, the YAML file and the ``ddp`` command.

A field's description is the form's help text and the command line's words, so it is written for
the person who fills it in. Cross-field checks that need no look at the machine are here; those
that do (which GPUs exist, whether torch can use them) are in :mod:`ddp_core.runs.preflight`.
"""

from ddp_core.config.launch import LaunchConfig, is_torchrun_variable
from ddp_core.config.reading import (
    apply_overrides,
    describe_fields,
    field_errors,
    from_dict,
    from_yaml,
    load,
    load_dict,
    parse_yaml,
    to_yaml,
)
from ddp_core.config.run import NAME_LIMIT, RunConfig, sections
from ddp_core.config.training import CheckpointsConfig, DatasetName, DdpConfig, TrainingConfig, WatchConfig

__all__ = [
    "NAME_LIMIT",
    "CheckpointsConfig",
    "DatasetName",
    "DdpConfig",
    "LaunchConfig",
    "RunConfig",
    "TrainingConfig",
    "WatchConfig",
    "apply_overrides",
    "describe_fields",
    "field_errors",
    "from_dict",
    "from_yaml",
    "is_torchrun_variable",
    "load",
    "load_dict",
    "parse_yaml",
    "sections",
    "to_yaml",
]

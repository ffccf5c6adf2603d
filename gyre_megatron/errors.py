"""Every error that Gyre raises on purpose.

Each class is also a child of the standard-library error a caller would expect, so
`except ValueError` keeps working. A message says what was wrong, what was expected
and how to mend it.
"""

from __future__ import annotations


class GyreError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(GyreError, ValueError):
    """A configuration file, key or value cannot be used."""


class VersionError(GyreError, ImportError):
    """An installed dependency is missing or has a version that was not tested."""


class DeviceError(GyreError, RuntimeError):
    """The device that an operation needs is not there, or cannot do it."""


class LayoutError(GyreError, ValueError):
    """A weight layout contradicts itself, the model or another layout."""


class PlanError(GyreError, ValueError):
    """A resharding plan cannot be made, or does not cover every element exactly once."""


class TransferError(GyreError, RuntimeError):
    """Weights did not arrive whole; the previous version stays in place."""


class EngineError(GyreError, RuntimeError):
    """A rollout engine refused a request, answered wrongly or died."""


class StoreError(GyreError, RuntimeError):
    """The trajectory store could not be read or written."""


class TemplateError(GyreError, ValueError):
    """A chat template cannot be rendered incrementally, or not at all."""


class TrajectoryError(GyreError, ValueError):
    """Calls of an execution cannot form the tree or the bin that was asked for."""


class PolicyError(GyreError, ValueError):
    """A scheduler state or order is impossible."""


class StalledError(PolicyError):
    """Nothing can happen any more, and the run is not over."""


class CheckpointError(GyreError, RuntimeError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class ParityError(GyreError, ArithmeticError):
    """Trainer and engine disagree on the log-probabilities of the same tokens."""


class CellError(GyreError, RuntimeError):
    """A cell failed, timed out or reported an order it was not given."""


class RunDirectoryError(GyreError, RuntimeError):
    """The run directory is in use, or holds a run that was not asked to resume."""

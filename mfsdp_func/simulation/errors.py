"""What goes wrong in a simulation."""


class SimulationError(RuntimeError):
    """The simulated ranks cannot go on: a deadlock, or a result read too early. Says which rank waits for what."""


class SlowRankWarning(RuntimeWarning):
    """A simulated rank has not come to an exchange, or to its end, for a long time; maybe it waits for a lock."""


class Aborted(BaseException):
    """Ends a rank's thread after another rank has failed."""


class Killed(BaseException):
    """Ends a rank's thread where a fault kills it."""

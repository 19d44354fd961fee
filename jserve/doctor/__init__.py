"""What has to be right around jserve before it can serve: each check is a function from the config to findings.

`jserve doctor` runs them.  Nothing here starts an engine or changes anything, and jax is only started in a child
process, because a device that another process holds can make it wait for ever.
"""

from jserve.doctor.checks import run_checks
from jserve.doctor.finding import FAIL, OK, WARN, Finding

__all__ = ["FAIL", "OK", "WARN", "Finding", "run_checks"]

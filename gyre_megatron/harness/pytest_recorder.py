"""A pytest plugin that notes each outcome as it happens, so that a suite that hangs still has a
score.

Runs in the evaluator's own interpreter, by file name; standard library only.
"""

import os
import sys


def pytest_configure(config):
    """Only now, with pytest itself loaded, may the workspace be imported from."""
    # The file's presence says that the suite was begun: from here on failures are the workspace's.
    with open(os.environ["GYRE_REPORT"], "w", encoding="utf-8"):
        pass
    sys.path.insert(0, os.environ["GYRE_WORKSPACE"])


def pytest_runtest_logreport(report):
    """One line a test: its outcome, once."""
    decided = report.when == "call" or report.outcome != "passed"
    if decided:
        with open(os.environ["GYRE_REPORT"], "a", encoding="utf-8") as file:
            file.write(
                f"{os.environ['GYRE_NONCE']} {report.when} {report.outcome} {report.nodeid}\n"
            )

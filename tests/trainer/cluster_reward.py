"""Rewards that wait or fail where a file says so, in a module that imports little: scoring processes start fast.

``gate`` is a column of the data: a path that usually doesn't exist.
"""

import os
import time


def gated(response_ids, gate):
    """The share of low tokens; while the gate is there, it says in ``<gate>.waits`` that somebody waits for it."""
    if os.path.exists(gate):
        open(gate + ".waits", "w").close()
        while os.path.exists(gate):
            time.sleep(0.01)
    return sum(i < 16 for i in response_ids) / len(response_ids)


def picky(response_ids, prompt, gate):
    """The same, but no answer to ``bc`` can be graded while the gate is there."""
    if prompt == "bc" and os.path.exists(gate):
        raise ValueError("no grade for bc")
    return sum(i < 16 for i in response_ids) / len(response_ids)

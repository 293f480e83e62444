"""Rewards that users write by mistake, in a module that imports nothing: scoring processes start fast."""


def stuck(response_ids):
    """Never returns for some answers."""
    while response_ids[0] % 5 == 0:
        pass
    return 0.5


def one_for_all(responses):
    """One value, however many answers there are."""
    return [1.0]

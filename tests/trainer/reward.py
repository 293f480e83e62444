"""A reward in a module that imports nothing: scoring processes start fast."""


def low_ids(response_ids):
    """Signal on a random model: the share of tokens from the vocabulary's first half."""
    return sum(i < 16 for i in response_ids) / len(response_ids)


def even(response_ids):
    """Signal on a random model: how many of six tokens are even."""
    return sum(i % 2 == 0 for i in response_ids) / 6


def first_low(response_ids):
    """Right or wrong: whether the first token is of the vocabulary's first half."""
    return float(response_ids[0] < 16)


def sparse(response_ids):
    """No opinion on some rows, and a number beside the score on some of the others."""
    if response_ids[0] % 3 == 0:
        return None
    low = low_ids(response_ids)
    return {"score": low, "first": response_ids[0]} if response_ids[0] % 2 else low


def flat(response):
    """The same for every row."""
    return 1.0

"""A reward in a module that imports nothing: scoring processes start fast."""


def low_ids(response_ids):
    """Signal on a random model: the share of tokens from the vocabulary's first half."""
    return sum(i < 16 for i in response_ids) / len(response_ids)


def first_low(response_ids):
    """Right or wrong: whether the first token is of the vocabulary's first half."""
    return float(response_ids[0] < 16)

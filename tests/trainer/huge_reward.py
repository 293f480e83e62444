"""A reward whose advantages no float32 can hold, on some prompts; a module that imports nothing."""


def huge(response_ids, prompt):
    return (1e300 if prompt in ("ba", "bc", "ca", "us") else 1.0) * response_ids[0]

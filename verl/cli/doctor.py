"""``verl doctor``: versions, devices, and what is missing for which feature."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import version

OPTIONAL = {
    "math_verify": "reward rule math (pip install 'verl[math]')",
    "reasoning_gym": "reasoning-gym tasks (pip install 'verl[gym]')",
    "tensorboard": "curves in tensorboard/",
    "pynvml": "GPU utilisation as a metric",
}


def doctor() -> None:
    """Print the report."""
    import torch

    from verl import __version__
    from verl.models.factory import resolve_dtype

    print(f"verl {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}")
    for name in ("torch", "transformers", "peft", "datasets", "safetensors", "pydantic"):
        print(f"  {name:<14}{version(name)}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"  cuda:{index}        {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    print(f"  default device {device}, dtype auto is {str(resolve_dtype('auto', device)).removeprefix('torch.')}")
    for module, feature in OPTIONAL.items():
        print(f"  {'yes' if importlib.util.find_spec(module) else 'no ':<4}{feature}")

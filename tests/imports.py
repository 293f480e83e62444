"""What the process imports that all others of a test run are forked from (``tests/forks.py``): it takes seconds."""

import contextlib
import gc
import importlib

gc.disable()  # most of what imports leave stays for good
for name in (
    "verl.runtime.host", "verl.cli.train", "verl.engines.megatron", "tests.engines.ranks", "tests.hybrid.engines",
    "tests.hybrid.toy", "tests.runtime.own_loop", "torch._dynamo", "transformers.generation",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "peft", "pandas",
):  # fmt: skip
    with contextlib.suppress(ImportError):  # a package that isn't installed
        importlib.import_module(name)
gc.collect()
gc.freeze()
gc.enable()

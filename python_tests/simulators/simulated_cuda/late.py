"""Runs torch operators as kernels of the simulation: in the order of the compute stream, and again with every launch of
a graph that captured them.

Within `late(sim)`, native operations of the extension compute as on a GPU: the torch operators that they call are
enqueued on the compute stream of the calling thread. An operator that returns a new tensor also runs at once, to
determine its shape; the tensor holds NaN until the stream has run the operator, so that a missing wait is detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators on memory instead of values; they run at once.
AT_ONCE = {"aten::set_", "aten::resize_", "aten::detach"}


class late(TorchDispatchMode):
    """A context that enqueues the operators that this thread calls. `enqueued`: their number."""

    def __init__(self, sim: Any) -> None:
        super().__init__()
        self.sim, self.enqueued = sim, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():  # below autograd, which decomposes them otherwise
            with self:
                return func.decompose(*args, **kwargs)
        schema = func._schema
        made = func(*args, **kwargs) if not schema.is_mutable or schema.name in AT_ONCE else None
        views = any(returned.alias_info is not None for returned in schema.returns)
        if made is not None and (
            views or schema.name in AT_ONCE or schema.name.startswith(("aten::empty", "aten::new_empty"))
        ):
            return made
        self.enqueued += 1
        if made is None:  # writes to its arguments

            def write() -> None:
                with torch.no_grad():
                    func(*args, **kwargs)

            self.sim.launch(write)
            written = [
                kwargs[argument.name] if argument.name in kwargs else args[place]
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(schema.returns) == 1 else None if not schema.returns else tuple(written)
        if not isinstance(made, torch.Tensor):
            raise NotImplementedError(f"{schema.name} does not return a single tensor")
        if made.is_floating_point():
            made.fill_(float("nan"))

        def again() -> None:
            with torch.no_grad():
                made.copy_(func(*args, **kwargs))

        self.sim.launch(again)
        return made

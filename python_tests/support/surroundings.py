"""Whether a process is as it was before a function ran in it, so that the next one finds it as good as new.

What a function may leave: caches (DTensor's are why a process is kept), and modules that it was the first to import.
What it may not: patches, process groups, rings, threads, handlers, settings. Whoever finds any ends the process.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

import rtp_ext

PACKAGES = tuple(str(Path(package.__file__).parent) + os.sep for package in (rtp_ext, torch))
ROOT = str(Path(__file__).resolve().parents[2])
# Whose functions, classes and constants tests replace.
WATCHED = ("rtp_ext", "torch.distributed", "torch.nn", "torch.optim", "torch.cuda", "torch.utils.checkpoint")
LOGGERS = ("", "rtp_ext", "torch", "torch.distributed", "transformers", "py.warnings")


def _is_ours(module: types.ModuleType) -> bool:
    """Of the tests or benchmarks."""
    return str(getattr(module, "__file__", None) or "").startswith(ROOT) and not module.__name__.startswith("rtp_ext")


def _is_watched(name: str, module: types.ModuleType) -> bool:
    return name == "torch" or name.startswith(WATCHED) or _is_ours(module)


def _content(name: str, value: Any) -> Any:
    """Of a table, what is in it. One that is empty when its module is imported is a cache."""
    if type(value) not in (dict, list, set) or not name.strip("_").isupper() or not value:
        return None
    return value.copy()


class _Names:
    """What the names of a module, and of the classes that it defines, stand for."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self.values = dict(vars(module))
        self.contents = {n: kept for n, value in self.values.items() if (kept := _content(n, value)) is not None}
        own = (value for value in self.values.values() if issubclass(type(value), type))
        self.classes = {value: dict(vars(value)) for value in own if value.__module__ == module.__name__}

    def difference(self) -> str | None:
        now = vars(self.module)
        for name, value in self.values.items():
            if now.get(name, self) is not value:
                return f"{self.module.__name__}.{name}"
        for name, content in self.contents.items():
            if _content(name, now[name]) != content:
                return f"what is in {self.module.__name__}.{name}"
        for kind, before in self.classes.items():
            members = vars(kind)
            for name, value in before.items():
                if members.get(name, self) is not value and not self._by_design(members.get(name)):
                    return f"{self.module.__name__}.{kind.__qualname__}.{name}"
            for name in members.keys() - before.keys():
                inherited = any(name in vars(base) for base in kind.__mro__[1:])
                if inherited and not name.startswith("__") and not self._by_design(members[name]):
                    return f"{self.module.__name__}.{kind.__qualname__}.{name}, which it inherits"
        return None

    def _by_design(self, value: Any) -> bool:
        """What torch or the package itself puts in the place of a method of torch, as long as the process lives."""
        source = getattr(getattr(value, "__code__", None), "co_filename", "")
        return source.startswith(PACKAGES) and self.module.__name__.startswith("torch")


class Surroundings:
    """Of a rank of a process group, from when it is made."""

    def __init__(self) -> None:
        self._names: dict[str, _Names] = {}
        self._kept = dict(os.environ)
        self._random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._settings = self._read()
        self.watch()

    def watch(self) -> None:
        """Takes what has been imported meanwhile as it is now."""
        for name, module in list(sys.modules.items()):
            if name not in self._names and isinstance(module, types.ModuleType) and _is_watched(name, module):
                self._names[name] = _Names(module)

    def renew(self) -> None:
        """Puts back what any function may change: the environment, and the states of random numbers."""
        os.environ.update(self._kept)
        for name in [name for name in os.environ if name not in self._kept]:
            del os.environ[name]
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])

    def difference(self) -> str | None:
        """What has been left behind, or None. What nobody holds is collected first."""
        gc.collect()
        for name, module in list(sys.modules.items()):
            if name not in self._names and isinstance(module, types.ModuleType) and _is_ours(module):
                return f"{name} was imported, and may have been changed"
        for names in self._names.values():
            if found := names.difference():
                return found
        for what, value in self._read().items():
            if value != self._settings[what]:
                return f"{what}: {value}, not {self._settings[what]}"
        return None

    @staticmethod
    def _read() -> dict[str, Any]:
        loggers = [logging.getLogger(name) for name in LOGGERS]
        dynamo = sys.modules.get("torch._dynamo.utils")
        return {
            "process groups": sorted(dist.distributed_c10d._world.pg_names.values()),
            "the default group": id(dist.group.WORLD),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "compiled": bool(dynamo.counters) if dynamo else False,
            "folder": os.getcwd(),
            "arguments": list(sys.argv),
            "where modules are found": list(sys.path),
            "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
            "output": (id(sys.stdout), id(sys.stderr)),
            "loggers": [(each.level, each.disabled, each.propagate, tuple(map(id, each.handlers))) for each in loggers],
            "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
            "garbage collection": (gc.isenabled(), gc.get_threshold()),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads of torch": torch.get_num_threads(),
            "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "anomalies": torch.is_anomaly_enabled(),
        }

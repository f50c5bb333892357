"""`generate` for models of the transformers package, on ranks that need different numbers of forwards.

A forward of a converted model needs all ranks of a ring, while ranks stop generating when their own sequences end.
Under `synced_gpus` transformers continues the loop of a finished rank: this writes to its caches, runs past the end of
a static cache and of a table of positions, excludes assisted generation, and synchronizes the ranks of the world rather
than those of the ring. Here ranks agree before each call of the model instead, and a finished rank joins with a call of
one token, without a cache. This works for every way to choose tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from rtp_ext._native import RingTimeout
from rtp_ext.compilers import eager
from rtp_ext.convert.modules.bundled import OWN_HOOKS
from rtp_ext.convert.scopes import is_inside, ring_of_module
from rtp_ext.dtensor_hooks import patch_generate
from rtp_ext.outer import ZeroOuter
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import GRADIENT_HANDLER
from rtp_ext.ring.links.agree import expect_same, expect_success

_CACHES = ("cache", "past_key_values")  # names of the argument with keys and values since and before transformers 5.24
# Arguments of a forward that do not decide which layers run, and that a call of one token does not need.
_OPTIONAL = {
    *_CACHES,
    "attention_mask",
    "cache_params",
    "cache_position",
    "decoder_attention_mask",
    "decoder_position_ids",
    "logits_to_keep",
    "position_ids",
}
_TOKENS = ("input_ids", "token_type_ids")  # ends of names: integers [rows, length]; any value is valid
_EMBEDDED = "inputs_embeds"  # end of a name: [rows, length, features]
_ENCODED = {"encoder_outputs", "input", "input_features", "input_values"}  # inputs that a rank cannot make up
_CROSS = "cross_attention_cache"  # cache of an encoder's keys and values, which are then not computed again

# Options that draft tokens by calls of single layers of the model, or of fewer layers than a forward.
_REFUSED = ("assistant_early_exit", "use_mtp")

_running: list[_Generation] = []


def synchronize_generate() -> None:
    """Patches `generate` of transformers' models so that all ranks call a model with rotating parts equally often.
    Models that do not rotate generate as before."""
    patch_generate(generate=_in_step, init_continuous_batching=_refusing)


def _in_step(method: Any) -> Any:
    @functools.wraps(method)
    def generate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        call = functools.partial(method, self, *arguments)
        ring = _ring_of(self)
        if ring is None or any(self is part for each in _running for part in each.parts.values()):
            return call(**keywords)
        if _running:  # refused for other rings, too: one rank's tokens decide how often an assistant is called
            raise ValueError(
                f"generate of {type(self).__name__} within that of {type(_running[0].model).__name__}: expected one "
                "converted model to generate at a time: an assistant_model that is not converted"
            )
        return _Generation(self, ring).run(call, keywords)

    return generate


def _refusing(method: Any) -> Any:
    @functools.wraps(method)
    def init_continuous_batching(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if _ring_of(self) is not None:
            raise ValueError(
                f"continuous batching of {type(self).__name__}: a thread of its own calls the model, as often as this "
                "rank's requests require, which cannot be combined with rotation: expected generate without "
                "cache_implementation='paged', with the same number of calls on every rank"
            )
        return method(self, *arguments, **keywords)

    return init_continuous_batching


def _ring_of(model: Any) -> Ring | None:
    """Returns the ring of a model's rotating parts; None where its forwards wait for no other rank."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    ring = next((ring for part in parts if (ring := ring_of_module(part)) is not None), None)
    if ring is None or ring.mesh is None or ring.pulls_from is not None:
        return None
    if ring.size == 1 and _replicas_of(model) is None:
        return None
    return ring


def _replicas_of(model: nn.Module) -> ZeroOuter | None:
    """Returns the outer policy of a model, if forwards of replicas wait for each other."""
    handlers = (parameter.__dict__.get(GRADIENT_HANDLER) for parameter in model.parameters())
    policy = next((handler.policy for handler in handlers if handler is not None), None)
    return policy if isinstance(policy, ZeroOuter) and policy.replicas is not None else None


class _Call(NamedTuple):
    """The properties of a call that decide which layers run: a call of the model, or of a part outside its forward."""

    part: str  # "": the model
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.part or 'the model'}({', '.join(self.inputs)})"


@dataclass(frozen=True)
class _Turn:
    """The message of a rank to the others before a call.

    call: its next call; None: it has finished. seen: stored inputs, as (part, name), that it can use in a call that
    only others need, besides those that it can make up. problem: the error of its generation.
    """

    model: str
    call: _Call | None
    seen: frozenset[tuple[str, str]] = frozenset()
    problem: str | None = None

    def can_join(self, call: _Call) -> bool:
        made = (*_TOKENS, _EMBEDDED)
        return call == self.call or all(name.endswith(made) or (call.part, name) in self.seen for name in call.inputs)


class _Generation:
    """One call of `generate` on a rank, in step with those of the other ranks.

    Attributes:
        parts: the modules that it may call alone, by name: the model, its encoder and the like, its embeddings.
    """

    def __init__(self, model: Any, ring: Ring) -> None:
        self.model, self.ring, self.replicas = model, ring, _replicas_of(model)
        self.parts = {name: part for name, part in model.named_modules() if self._may_be_called(part)}
        self._inputs: dict[tuple[str, str], Any] = {}  # inputs of the latest calls that cannot be made up
        self._depth = 0  # number of running calls of parts, one within another
        self._others_failed = False

    def _may_be_called(self, part: nn.Module) -> bool:
        if part is self.model:
            return True
        own = hasattr(part, "main_input_name")  # a model of transformers
        for name in ("get_input_embeddings", "get_output_embeddings"):
            with contextlib.suppress(AttributeError, NotImplementedError):
                own = own or part is getattr(self.model, name)()
        return own and any(is_inside(each) for each in part.modules())

    def run(self, generate: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        handles: list[RemovableHandle] = []
        for name, part in self.parts.items():
            handles.append(part.register_forward_pre_hook(_Before(self, name), with_kwargs=True, prepend=True))
            handles.append(part.register_forward_hook(_After(self)))
        _running.append(self)
        try:
            self._refuse(keywords)
            if keywords.get("synced_gpus"):  # see the docstring of this file
                keywords = {**keywords, "synced_gpus": False}
            result = generate(**keywords)
            while (call := self._agree(None)) is not None:
                self._stand_in(call)
            return result
        except Exception as error:
            # Within a call of the model the other ranks wait in hops; after a failure they exchange no more messages.
            if self._depth == 0 and not self._others_failed and self.ring.alive:
                self._tell(f"{type(error).__name__}: {error}")
            raise
        finally:
            _running.remove(self)
            for handle in handles:
                handle.remove()

    def _refuse(self, keywords: Mapping[str, Any]) -> None:
        label = f"generate of {type(self.model).__name__}"
        configs = [keywords.get("generation_config"), getattr(self.model, "generation_config", None)]
        for name in _REFUSED:
            given = [keywords.get(name), *(getattr(config, name, None) for config in configs)]
            if asked := next((value for value in given if value), None):
                raise ValueError(
                    f"{label}: {name}={asked!r} drafts tokens with some of the model's layers alone, which cannot be "
                    "combined with rotation: expected an assistant_model that is not converted, or "
                    "prompt_lookup_num_tokens"
                )

    # -- agreeing ----------------------------------------------------------------------------------------------------

    def _agree(self, call: _Call | None) -> _Call | None:
        """Agrees on the next call of all ranks, and returns it; None: all ranks have finished. `call`: the next call of
        this rank. Collective.

        Raises RuntimeError where another rank's generation has failed, ValueError where ranks generate with different
        models, or where a rank lacks the inputs to join a call.
        """
        seen = frozenset(key for key, value in self._inputs.items() if key[1] != _CROSS or _is_filled(value))
        turns = self._exchange(_Turn(type(self.model).__name__, call, seen))
        self._others_failed = True  # unless all is well
        problems, models = [turn.problem for turn in turns], [turn.model for turn in turns]
        expect_success(f"generate of {type(self.model).__name__}", problems, raises=RuntimeError, named=self._named)
        expect_same("generate, the models of all ranks", models, named=self._named)
        wanted = {turn.call: rank for rank, turn in reversed([*enumerate(turns)]) if turn.call is not None}
        for chosen in sorted(wanted, key=wanted.__getitem__):
            if all(turn.can_join(chosen) for turn in turns):
                self._others_failed = False
                return chosen
        if wanted:
            text = ", ".join(f"{call} on {self._named(rank)}" for call, rank in wanted.items())
            raise ValueError(
                f"generate of {turns[0].model}: expected all ranks to call the same parts of the model with the same "
                f"kinds of inputs, got {text}"
            )
        self._others_failed = False
        return None

    def _tell(self, problem: str) -> None:
        """Makes the generations of the other ranks fail, too. Collective."""
        with contextlib.suppress(Exception):  # the caller raises this rank's own error
            self._exchange(_Turn(type(self.model).__name__, None, problem=problem))

    def _exchange(self, turn: _Turn) -> list[_Turn]:
        """Returns the turns of all ranks that a forward waits for."""
        try:
            answers = self.ring.exchange(turn)
            if self.replicas is not None:
                rows = self.replicas.exchange(answers)
                answers = [theirs for row in rows for theirs in (row if isinstance(row, list) else [row])]
        except RingTimeout as error:
            error.args = (f"generate of {turn.model}, which every rank of the ring has to call: {error}",)
            raise
        if not all(isinstance(theirs, _Turn) for theirs in answers):
            self._others_failed = True
            raise ValueError(
                f"generate of {turn.model}: expected every rank of the ring to call generate, got one that "
                "calls something else, such as the model itself"
            )
        return answers if self.ring.tensor_mesh is None else self._compared(answers)

    def _compared(self, answers: list[_Turn]) -> list[_Turn]:
        """Compares the answers on the ranks of tensor parallelism, which have the same batch and have to agree."""
        assert self.ring.tensor_mesh is not None
        group = self.ring.tensor_mesh.get_group()
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, answers, group=group)
        failed = next((row for row in rows if any(turn.problem is not None for turn in row)), None)
        if failed is not None:
            return failed
        if any(row != answers for row in rows):
            self._others_failed = True
            raise ValueError(
                f"generate of {answers[0].model}: expected ranks of tensor parallelism to generate the same tokens, "
                "got calls that differ: give them the same batch and, for sampling, the same seed"
            )
        return answers

    def _named(self, place: int) -> str:
        replica, rank = divmod(place, self.ring.size)
        return f"rank {rank}" if self.replicas is None else f"rank {rank} of replica {replica}"

    # -- calls -------------------------------------------------------------------------------------------------------

    @eager
    def before(self, name: str, part: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        """Runs before a call of a part on this rank: all ranks call it, with their own inputs or with any others."""
        if self._depth == 0:
            given = inspect.signature(part.forward).bind_partial(*arguments).arguments if arguments else {}
            own = self._note(name, {**given, **keywords})
            while (call := self._agree(own)) != own:
                assert call is not None, "this rank has a call"
                self._stand_in(call)
        self._depth += 1

    @eager
    def after(self) -> None:
        self._depth -= 1

    def _note(self, name: str, given: Mapping[str, Any]) -> _Call:
        """Returns the call of a part, and stores the inputs that a later call will need."""
        inputs = [
            key for key, value in given.items() if key not in _OPTIONAL and any(map(_is_tensor, tree_leaves(value)))
        ]
        self._inputs.update({(name, key): given[key] for key in inputs if key in _ENCODED})
        cache = next((given[key] for key in _CACHES if given.get(key) is not None), None)
        if hasattr(cache, _CROSS):
            self._inputs[name, _CROSS] = cache
            inputs += [_CROSS] if _is_filled(cache) else []
        return _Call(name, tuple(sorted(inputs)))

    @torch.no_grad()
    def _stand_in(self, call: _Call) -> None:
        """Joins a call that other ranks need, without an effect on this rank's generation."""
        part = self.parts[call.part]
        accepted = inspect.signature(part.forward).parameters
        given: dict[str, Any] = {name: self._inputs[call.part, name] for name in call.inputs if name in _ENCODED}
        rows = next((len(leaf) for leaf in tree_leaves(given) if _is_tensor(leaf)), 1)
        given |= {name: value for name, value in _BARE.items() if name in accepted}
        for name in call.inputs:
            if name.endswith(_TOKENS):
                given[name] = torch.zeros(rows, 1, dtype=torch.long, device=self.ring.device)
            elif name.endswith(_EMBEDDED):
                table = self.model.get_input_embeddings().weight
                given[name] = torch.zeros(rows, 1, table.shape[-1], dtype=table.dtype, device=self.ring.device)
            elif name == _CROSS:
                key = next(key for key in _CACHES if key in accepted)
                given |= {key: _beside(self._inputs[call.part, _CROSS]), "use_cache": True}
        devices = [self.ring.device] if self.ring.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # of dropout
            self._depth += 1
            part(**given)
            self._depth -= 1


_BARE = {"use_cache": False, "return_dict": True}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_filled(cache: Any) -> bool:
    return any(cache.is_updated.values())


def _beside(cache: Any) -> Any:
    """Returns a cache with the same keys and values of the encoder, and none of the decoder."""
    return type(cache)(sys.modules[type(cache).__module__].DynamicCache(), cache.cross_attention_cache)


class _Before:
    def __init__(self, generation: _Generation, name: str) -> None:
        self.generation, self.name = generation, name

    def __call__(self, part: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        self.generation.before(self.name, part, arguments, keywords)


class _After:
    def __init__(self, generation: _Generation) -> None:
        self.generation = generation

    def __call__(self, _part: nn.Module, _arguments: Any, _output: Any) -> None:
        self.generation.after()


for _hook in (_Before, _After):
    setattr(_hook, OWN_HOOKS, True)

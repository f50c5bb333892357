"""Each patch of rtp_ext/dtensor_hooks.py is still needed: torch without it does what the patch is there to prevent."""

from __future__ import annotations

import re
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Cases, run_ranks
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import parametrizations, prune

import rtp_ext
from rtp_ext import dtensor_hooks
from rtp_ext.dtensor_hooks import STEP_STAGES, before_steps, before_steps_of


def needed(patch: str) -> str:
    return f"torch {torch.__version__} no longer needs {patch} of rtp_ext/dtensor_hooks.py: remove it, and its callers"


def _torch_alone(rank, ranks):
    """No ring is made in these processes, so that nothing is patched."""
    cases, mesh = Cases(), init_device_mesh("cpu", (ranks,))

    def parameter(whole: torch.Tensor, placement: Placement) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(whole, mesh, [placement]))

    def layer() -> nn.Linear:
        made = nn.Linear(4, 4, bias=False)
        made.weight = parameter(torch.rand(4, 4), Shard(0))
        return made

    assert DTensor.full_tensor.__code__.co_filename.startswith(torch.__path__[0]), "control: torch's own"
    for name, whole_of in (
        ("full_tensor", lambda p: p.full_tensor()),
        ("redistribute", lambda p: p.redistribute(placements=[Replicate()]).to_local()),
    ):
        with cases.case(name):
            weight = parameter(torch.ones(4), Shard(0))
            (whole_of(weight) * (rank + 1)).sum().backward()
            assert (weight.grad.to_local() == rank + 1).all(), needed("patch_full_tensor")  # the mean is 1.5
    with cases.case("data"):
        weight = parameter(torch.zeros(4), Shard(0))
        weight.data = torch.ones(4)
        assert (weight.to_local() == 0).all(), needed("patch_data")
        weight.data.add_(1.0)
        assert weight._version == 0, needed("patch_data")
    with cases.case("random operators"):
        torch.manual_seed(0)
        first = nn.init.normal_(parameter(torch.zeros(2 * ranks), Shard(0))).full_tensor()
        assert torch.equal(first[:2], first[2:4]), needed("patch_random")
    with cases.case("operators"):
        weight, loss = parameter(torch.ones(4), Shard(0)), torch.tensor(float(rank), requires_grad=True)
        part = weight.sum()
        assert isinstance(loss + part, DTensor), needed("patch_operators")
        assert part.item() == 2.0, needed("patch_operators")  # of 4
        torch._foreach_mul_([weight.detach()], 1.0)
        assert weight._version == 0, needed("patch_operators")
        small = parameter(torch.ones(1), Shard(0)).detach()
        with pytest.raises(RuntimeError, match="placement"):
            small.add_(parameter(torch.ones(1), Replicate()).detach())
        if rank == 1:  # the other rank would wait for this one
            with pytest.raises(RuntimeError, match="empty"):
                torch.linalg.vector_norm(small, float("inf"))
        product = loss * part
        product.full_tensor().backward()
        assert isinstance(loss.grad, DTensor), needed("patch_mixing")
    with cases.case("GradScaler"):
        assert not _overflow_seen(parameter, rank) or rank == 1, needed("patch_grad_scaler")
        assert _overflow_seen(parameter, rank, sharded_first=True), "control: it is seen by a sharded gradient"
    for options in ({"foreach": True}, {"fused": True}):
        with cases.case(f"writes {options}"):
            weight = parameter(torch.ones(4), Shard(0))
            weight.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
            before = weight._version
            torch.optim.AdamW([weight], **options).step()
            assert weight._version == before, needed("count_writes")
    with cases.case("DistributedDataParallel"), pytest.raises(NotImplementedError, match="broadcast_") as caught:
        nn.parallel.DistributedDataParallel(layer())
    assert "expected" not in str(caught.value), needed("refuse_ddp")
    with cases.case("fully_shard"):
        with pytest.raises(Exception, match="Invariant encountered") as caught:
            fully_shard(layer(), mesh=mesh)
        assert not isinstance(caught.value, ValueError), needed("refuse_fully_shard")
    ways = {
        "weight_norm": parametrizations.weight_norm,
        "old weight_norm": nn.utils.weight_norm,
        "old spectral_norm": nn.utils.spectral_norm,
        "prune": lambda module: prune.identity(module, "weight"),
    }
    for name, change in ways.items():
        with cases.case(name):
            changed = layer()
            change(changed)  # torch raises nothing
            assert "weight" not in changed._parameters, needed("patch_parametrizations")
    cases.finish()


def _overflow_seen(parameter, rank, sharded_first=False):
    whole, cut = parameter(torch.ones(3), Replicate()), parameter(torch.ones(4), Shard(0))
    gradients = []
    for each in (cut, whole) if sharded_first else (whole, cut):
        local = torch.ones_like(each.to_local())
        if each is cut and rank == 1:
            local[0] = float("inf")
        gradients.append(DTensor.from_local(local, each.device_mesh, each.placements, run_check=False))
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(()))
    return bool(found.item())


def test_torch_still_needs_its_patches():
    run_ranks(_torch_alone, 2)


def _state_dicts(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(AssertionError):  # torch: sizes have to divide
        _state_dict_utils.distribute_tensor(torch.arange(7.0), mesh, [_StridedShard(0, split_factor=2), Shard(0)])


def test_a_rule_is_suspended_in_the_thread_that_calls_torch_alone():
    """`operator` stands for one of torch: what it finds in the table is what torch would."""
    dispatcher, found = DTensor._op_dispatcher, []

    def operator(number):
        with ThreadPoolExecutor(1) as other:
            everywhere = other.submit(lambda: operator in dispatcher._custom_op_handlers)
            found.append((operator in dispatcher._custom_op_handlers, everywhere.result()))
        return number + 1

    dtensor_hooks._set_rule(operator, lambda stock, args, kwargs: 10 * stock(*args, **kwargs))
    try:
        assert dispatcher._custom_op_handlers[operator](operator, (1,), {}) == 20
        assert found == [(False, True)] and operator in dispatcher._custom_op_handlers
    finally:
        del dispatcher._custom_op_handlers[operator]


def test_torch_still_needs_the_patch_of_state_dicts():
    try:
        run_ranks(_state_dicts, 4)
    except AssertionError as error:
        raise AssertionError(needed("patch_state_dicts")) from error


def test_torch_still_needs_the_rules_of_its_compiler():
    rules = pytest.importorskip("torch._dynamo.trace_rules")
    untouched = rules.check_file("/somewhere/site-packages/a_package/module.py")
    assert not untouched.skipped, needed("register_traced_files")


def test_torch_still_names_groups_by_their_number(monkeypatch):
    """Two processes that have made different numbers of groups, or have them, give one group two names."""
    c10d, names = torch.distributed.distributed_c10d, []
    for others in (1, 2):
        world = types.SimpleNamespace(group_count=others, pg_names=dict.fromkeys(range(others)))
        monkeypatch.setattr(c10d, "_world", world)
        names.append(c10d._process_group_name([0, 1], True))
    assert names[0] != names[1], needed("named_groups")


def test_torch_still_needs_the_patch_of_pipeline_stages():
    """Stages reduce the gradients of FSDP and DistributedDataParallel, and call no other model."""
    stage = pytest.importorskip("torch.distributed.pipelining.stage")
    asked = []

    class Model(nn.Module):
        def __getattr__(self, name):
            asked.append(name)
            return super().__getattr__(name)

    model = Model()
    self = types.SimpleNamespace(submod=model, dp_group=None, scale_grads=lambda factor: None)
    stock = stage._PipelineStageBase.perform_reduce_grad
    getattr(stock, "__wrapped__", stock)(self, 1)
    assert asked == [], needed("patch_pipeline_stages")


def test_transformers_still_needs_the_patch_of_generate():
    """A rank generates for as long as its own sequence needs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=7, n_positions=16, bos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    generate = type(model).generate
    stock, calls = getattr(generate, "__wrapped__", generate), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    ids, counts = torch.zeros(1, 2, dtype=torch.long), []
    first = int(model(ids).logits[0, -1].argmax())
    for end in (first, None):
        calls.clear()
        stock(model, ids, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=0)
        counts.append(len(calls))
    assert counts == [1, 6], needed("patch_generate")


def test_stages_of_a_step_run_in_their_order(monkeypatch):
    hooks = sys.modules["rtp_ext.dtensor_hooks"]
    seen: list[str] = []
    monkeypatch.setattr(hooks, "_stages", {})
    monkeypatch.setattr(hooks, "_register_stages", lambda: None)
    for stage in reversed(STEP_STAGES):
        before_steps(stage, lambda optimizer, arguments, keywords, stage=stage: seen.append(stage))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert hooks._run_stages(optimizer, (optimizer,), {}) is None
    assert tuple(seen) == STEP_STAGES
    with pytest.raises(ValueError, match="expected a stage of stale"):
        before_steps("sometime", lambda *_: None)


def test_a_hook_of_one_optimizer_gets_what_the_caller_gave():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("first"))
    handle = before_steps_of(optimizer, lambda *given: seen.append(given))

    def closure() -> float:
        return 0.0

    optimizer.step(closure)
    assert seen == ["first", (optimizer, (optimizer, closure), {})]
    del seen[:]
    reference = weakref.ref(closure)
    del closure
    assert reference() is None, "the closure of a step is released with it"
    handle.remove()
    optimizer.step()
    assert seen == ["first"]


def test_no_other_file_patches_torch():
    """Searches for the usual forms of patches."""
    look = re.compile(
        r"DTensor\.\w+ = |_custom_op_handlers|register_optimizer_step_p|trace_rules|_state_dict_utils\.\w+ =|"
        r"\._process_group_name = "
    )
    package = Path(rtp_ext.__file__).parent
    found = [str(file.relative_to(package)) for file in package.rglob("*.py") if look.search(file.read_text())]
    assert found == ["dtensor_hooks.py"]

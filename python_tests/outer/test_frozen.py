"""Parameters that all replicas freeze in mid-training, and thaw: under every policy, and over a checkpoint."""

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from freezing_cases import freeze
from frozen_training import Outer
from grids import SWEEP, few
from harness import Cases, run_ranks
from local_training_cases import SHAPE, gather_all, other_values
from reference import assert_same, differs, full, local
from workers import EXACT, Replica, Workers, adamw, assert_trained_alike, momentum

from rtp_ext.outer import EF21, AllReduce, DiLoCo, Gossip, LocalSGD, TopK, ZeroOuter
from rtp_ext.outer.local_training.diloco import nesterov


def outer_adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1)


def streaming(period=4, delay=1):
    return DiLoCo(period, outer_adam, fragments=2, delay=delay, keep=0.25)


def mixed(replica):
    """The frozen parameters, of all ranks."""
    return gather_all(torch.cat([full(p.detach()).reshape(-1) for p in replica.model.mix.parameters()]))


POLICIES = {
    "all-reduce with feedback": lambda: AllReduce(TopK(0.2)),
    "all-reduce with an estimate": lambda: AllReduce(EF21(TopK(0.2))),
    "ZeroOuter": ZeroOuter,
    "local SGD": lambda: LocalSGD(2),
    "DiLoCo": lambda: DiLoCo(2),
    "DiLoCo, AdamW outside": lambda: DiLoCo(2, outer_adam),
    "streaming": streaming,
    "gossip": lambda: Gossip("ring"),
    "gossip beside": lambda: Gossip("ring", overlap=True),
    "PGA": lambda: Gossip("ring", 1, global_period=3),
}
ENOUGH = ("all-reduce with feedback", "ZeroOuter", "DiLoCo", "streaming", "gossip beside")
AT_ONCE = ("all-reduce with feedback", "all-reduce with an estimate", "ZeroOuter")  # replicas always agree


def still_cases(rank, cases):
    for name, policy in few([one for one in POLICIES.items() if one[0] in ENOUGH], list(POLICIES.items())):
        attach = name not in AT_ONCE
        # after a mean, or in the middle of a period, where some more are taken
        for steps in few((2,) if name in ("local SGD", "DiLoCo") else (3,), (2, 3)):
            with cases.case(f"frozen after {steps} steps, {name}"):
                shape = (4, 1) if isinstance(policy(), Gossip) else SHAPE
                replica = Replica(rank, shape, policy(), momentum, attach=attach)
                replica.train(steps)
                before, others = mixed(replica), replica.weights
                freeze(replica.model, True)
                replica.train(4)
                after = mixed(replica)
                assert_same(after.mean(0), before.mean(0), EXACT, "the mean of all replicas")
                if attach and not isinstance(policy(), Gossip):
                    assert torch.equal(after[0], after[-1]), "on which they agree"
                if not attach or (steps == 2 and name in ("local SGD", "DiLoCo", "DiLoCo, AdamW outside")):
                    assert torch.equal(after, before), "bit by bit"
                assert differs(replica.weights, others, 1e-3), "control: the others do move"
                replica.train(2)
                assert torch.equal(mixed(replica), after) or isinstance(policy(), Gossip)
                freeze(replica.model, False)
                replica.train(1)
                assert differs(mixed(replica), after, 1e-4), "thawed"
    with cases.case("what is frozen is sent no longer"):
        replica = Replica(rank, SHAPE, LocalSGD(1))
        replica.train(1)
        freeze(replica.model, True)
        before = replica.policy.bytes_sent()
        replica.train(1)
        trained = sum(local(p).nbytes for p in replica.model.parameters() if p.requires_grad)
        assert replica.policy.bytes_sent() - before == trained
        assert before == trained + sum(local(p).nbytes for p in replica.model.mix.parameters()), "control"
    with cases.case("feedback is kept for when it is thawed"):
        replica = Replica(rank, SHAPE, AllReduce(TopK(0.2)), attach=False)
        replica.train(2)
        kept = local(replica.policy.state_dict()["memory"]["mix.weight"]["error"]).clone()
        freeze(replica.model, True)
        replica.train(2)
        after = local(replica.policy.state_dict()["memory"]["mix.weight"]["error"])
        assert torch.equal(after, kept) and kept.abs().max() > 0
    with cases.case("gossip leaves alone what replicas agree on, bit by bit"):
        replica = Replica(rank, (4, 1), Gossip("ring"))
        replica.policy.average()
        replica.train(1)
        replica.policy.average()
        freeze(replica.model, True)
        before = mixed(replica)
        replica.policy._trained |= {index for index, _ in replica.policy._handled()}  # as if it might differ
        replica.train(3)
        assert torch.equal(mixed(replica), before)
        third = before * (1 / 3) + before * (1 / 3) + before * (1 / 3)
        assert not torch.equal(third, before), "control: a third three times over is not the whole"


def parity_cases(rank, cases):
    for name, make, period, options in (
        ("DiLoCo", nesterov, 2, {}),
        ("AdamW outside", outer_adam, 3, {}),
        ("streaming", nesterov, 4, {"fragments": 2, "delay": 1, "keep": 0.25}),
    ):
        with cases.case(f"frozen and thawed, {name}"):
            replica = Replica(rank, SHAPE, DiLoCo(period, make, **options))
            parts = [[n for n, _ in replica.model.named_parameters()]]
            if "fragments" in options:
                replica.policy.state_dict()
                parts = [list(part) for part in replica.policy._fragment_names]
            options.pop("fragments", None)
            outer = Outer(parts, period, make, **options)
            workers, lasting = Workers(SHAPE, outer), Workers(SHAPE, Outer(parts, period, make, **options))
            frozen = [False, False, False, True, True, True, True, True, False, False, False, True, False, False, False]
            for still in frozen:
                for model in (replica.model, *workers.models):
                    freeze(model, still)
                for each in (workers, lasting):
                    each.act.follow(each)
                for each in (replica, workers, lasting):
                    each.train(1)
            assert_trained_alike(replica, workers, name)
            assert differs(workers.weights, lasting.weights, 1e-3), "control: freezing did something"


def resume_cases(rank, cases, folder):
    policies = {
        "local": lambda: LocalSGD(3),
        "gossip": lambda: Gossip(overlap=True),
        "plain": lambda: DiLoCo(3),
        "streaming": lambda: streaming(4, 1),
    }
    every = list(itertools.product(policies, (2, 3, 4, 5), (False, True)))
    # saved in a period, when the mean has been taken, and with one under way; frozen before it is saved, and after
    enough = [("plain", 2, False), ("plain", 4, True), ("streaming", 2, False)]
    for name, begun, early in few(enough, every):
        first = Replica(rank, SHAPE, policies[name](), adamw)
        if early:
            first.train(begun - 1)
            freeze(first.model, True)
            first.train(1)
        else:
            first.train(begun)
        where, schedule, saved = f"{folder}/{name}{begun}{early}", first.schedule.state_dict(), first.weights
        dcp.save({"policy": first.policy}, checkpoint_id=where)
        freeze(first.model, True)
        first.train(4)
        still = first.weights
        freeze(first.model, False)
        first.train(4)
        for frozen_first in (False, True):
            with cases.case(f"{name} after {begun}, frozen early {early}, frozen before it is loaded {frozen_first}"):
                again = Replica(rank, SHAPE, policies[name](), adamw, model=other_values())
                freeze(again.model, frozen_first)
                dcp.load({"policy": again.policy}, checkpoint_id=where)
                freeze(again.model, True)
                assert torch.equal(again.weights, saved)
                again.schedule.load_state_dict(schedule)
                again.step = begun
                again.train(4)
                assert torch.equal(again.weights, still), "bit for bit, frozen"
                assert differs(still, saved, 1e-3), "control"
                # its saved state can be loaded, too; in the other order by the cases that freeze early
                if frozen_first or SWEEP:
                    dcp.save({"policy": again.policy}, checkpoint_id=f"{where}{frozen_first}")
                    last = Replica(rank, SHAPE, policies[name](), adamw, model=other_values())
                    freeze(last.model, frozen_first)
                    dcp.load({"policy": last.policy}, checkpoint_id=f"{where}{frozen_first}")
                    assert torch.equal(last.weights, still)
                freeze(again.model, False)
                if frozen_first:
                    with pytest.raises(ValueError, match=r"mix.weight was frozen when a checkpoint was loaded"):
                        again.train(1)
                else:
                    again.train(4)
                    assert torch.equal(again.weights, first.weights), "bit for bit, thawed"


def stateless(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def thawed_cases(rank, cases, folder):
    """An optimizer without state: parameters that are frozen before loading may be thawed."""
    for name, policy in (("plain", lambda: DiLoCo(3)), ("streaming", lambda: streaming(4, 1))):
        first = Replica(rank, SHAPE, policy(), stateless)
        first.train(5)
        dcp.save({"policy": first.policy}, checkpoint_id=f"{folder}/thawed {name}")
        schedule = first.schedule.state_dict()
        for steps in few((1,) if name == "plain" else (3,), (1, 3)):  # before the next outer step, and after
            runs = []
            for frozen_first in (False, True):
                again = Replica(rank, SHAPE, policy(), stateless, model=other_values())
                freeze(again.model, frozen_first)
                dcp.load({"policy": again.policy}, checkpoint_id=f"{folder}/thawed {name}")
                again.schedule.load_state_dict(schedule)
                again.step = 5
                freeze(again.model, True)
                again.train(steps)
                freeze(again.model, False)
                again.train(1)
                dcp.save({"policy": again.policy}, checkpoint_id=f"{folder}/{name}{steps}{frozen_first}")
                later = again.schedule.state_dict()
                again.train(5)
                runs.append(again.weights)
            with cases.case(f"{name}, thawed after {steps}"):
                assert torch.equal(runs[0], runs[1]), "both orders"
            with cases.case(f"{name}, saved just after it was thawed, {steps}"):
                again = Replica(rank, SHAPE, policy(), stateless, model=other_values())
                dcp.load({"policy": again.policy}, checkpoint_id=f"{folder}/{name}{steps}True")
                again.schedule.load_state_dict(later)
                again.step = 6 + steps
                again.train(5)
                assert torch.equal(again.weights, runs[1])


def _frozen(rank, ranks, folder):
    cases = Cases()
    still_cases(rank, cases)
    parity_cases(rank, cases)
    cases.finish()


def _resumed(rank, ranks, folder):
    cases = Cases()
    resume_cases(rank, cases, folder)
    thawed_cases(rank, cases, folder)
    cases.finish()


@pytest.mark.parametrize("part", [_frozen, _resumed])
def test_two_by_two(part, tmp_path):
    run_ranks(part, 4, str(tmp_path), timeout=300.0)

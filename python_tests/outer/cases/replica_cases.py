"""Cases of replicas, for every policy that gives the exact gradient of all batches."""

import functools

import torch
from reference import assert_same, differs, local, whole_gradients, wholes
from replica_models import EXACT, WIDTH, Tiny, adamw, all_losses, batch_loss, replicated, step_on
from torch import nn

import rtp_ext
from rtp_ext.outer import AllReduce

LINE = ("replicas", "ring")


def assert_same_gradients(found, plain, what, factor=1.0):
    for name, expected in whole_gradients(plain).items():
        assert_same(found[name], None if expected is None else expected * factor, EXACT, f"{what}: {name}")


def wrong(found, plain, factor):
    """Whether a wrong factor in any gradient would be detected."""
    return any(differs(found[name], expected * factor, EXACT) for name, expected in whole_gradients(plain).items())


def trains_as_one(rank, ranks, cases, shapes, policy=AllReduce, **how):
    """Runs four clipped steps of AdamW. `how`: arguments of `adamw`."""
    for shape, names, dims in shapes:
        with cases.case(f"training on {dict(zip(names, shape, strict=True))}"):
            model, plain = replicated(shape, names, dims=dims, outer=policy()), Tiny()
            optimizer, reference = adamw(model, **how), adamw(plain, **how)
            for step in range(4):
                losses = [functools.partial(batch_loss, model, rank, step)]
                found, norm = step_on(model, optimizer, losses, stock=bool(how))
                _, expected = step_on(plain, reference, [functools.partial(all_losses, plain, ranks, step, 1 / ranks)])
                assert_same(norm, expected, EXACT, f"norm of step {step}")
            for value, (name, other) in zip(wholes(model.parameters()), plain.named_parameters(), strict=True):
                assert_same(value, other, EXACT, name)
            assert differs(found["mix.weight"], local(plain.mix.weight.grad) * 2, EXACT), "control: clipped, and other"


def accumulates(rank, ranks, cases, shape, factor, ways, outer=None, sent_by=None):
    """`ways`: the micro-batches of a step that are reduced. `sent_by`: the bytes of one reduction."""
    model, plain = replicated(shape, outer=outer), Tiny()
    rtp_ext.set_gradient_divide_factor(model, factor)
    share = 1.0 if factor else 1 / ranks
    policy = rtp_ext.outer_of(model)
    own = sum(local(p).nbytes for p in model.parameters())
    sent_by = 2 * own * (shape[0] - 1) // shape[0] if sent_by is None else sent_by
    with torch.no_grad():
        batch_loss(model, rank, 0)  # gathers the parameters that need it
    for way in ways:
        with cases.case(f"{shape} divided by {factor}, reduced {way}"):
            before = policy.bytes_sent()
            for step in range(2):
                for each in (model, plain):
                    each.zero_grad()
                for micro, reduces in enumerate(way):
                    rtp_ext.set_requires_all_reduce(model, reduces)
                    batch_loss(model, rank, 10 * step + micro).backward()
                    all_losses(plain, ranks, 10 * step + micro).backward()
                assert_same_gradients(whole_gradients(model), plain, f"step {step}", share)
                assert wrong(whole_gradients(model), plain, share * (1 + 1e-6)), "control"
            sent = sent_by * sum(way) * 2
            assert abs(policy.bytes_sent() - before - sent) <= 8, (policy.bytes_sent() - before, sent)


def unequal_tokens(rank, ranks, cases, shape, outer=None):
    """Losses that are shares of one sum over all tokens; ranks have different numbers of tokens: divided by 1."""
    tokens = [2 + 3 * other for other in range(ranks)]
    with cases.case(f"unequal tokens on {shape}"):
        model, plain = replicated(shape, outer=outer), Tiny()
        sum(batch_loss(plain, other, 0, tokens[other], "sum") / sum(tokens) for other in range(ranks)).backward()
        for factor, share in ((1, 1.0), (None, 1 / ranks)):
            rtp_ext.set_gradient_divide_factor(model, factor)
            model.zero_grad()
            (batch_loss(model, rank, 0, tokens[rank], "sum") / sum(tokens)).backward()
            assert_same_gradients(whole_gradients(model), plain, f"divided by {factor}", share)
            assert wrong(whole_gradients(model), plain, share * (1 + 1e-6)), "control"


def not_reached_again(model, plain, rank, ranks, cases):
    with cases.case("not reduced, and not reached by the backward that reduces"):
        for each in (model, plain):
            each.zero_grad()
        with rtp_ext.no_sync(model):
            batch_loss(model, rank, 0).backward()
        model.mixes = False
        batch_loss(model, rank, 1).backward()
        all_losses(plain, ranks, 0).backward()
        plain.mixes = False
        all_losses(plain, ranks, 1).backward()
        assert_same_gradients(whole_gradients(model), plain, "flushed", 1 / ranks)


def left_out_between_reductions(model, plain, rank, ranks, cases):
    """One of two replicas does not use a layer in some micro-batches; the second of these is not reduced."""
    both = (0, 1)
    with cases.case("what one replica leaves out between reductions"):
        for step, (users, without) in enumerate(
            [(both, ()), ((1,), (1, 2)), ((0,), (1, 2)), ((1,), (1,)), ((0,), (1,))]
        ):
            for each in (model, plain):
                each.zero_grad()
            for micro, reduces in enumerate((True, False, True)):
                mixing = users if micro in without else both
                rtp_ext.set_requires_all_reduce(model, reduces)
                model.mixes = rank // 2 in mixing
                batch_loss(model, rank, step + micro).backward()
                total = 0
                for replica in both:
                    plain.mixes = replica in mixing
                    total = total + all_losses(plain, (2 * replica, 2 * replica + 1), step + micro)
                total.backward()
            assert_same_gradients(whole_gradients(model), plain, f"step {step}", 1 / ranks)
    model.mixes = plain.mixes = True


def parts_of_backwards(rank, ranks, cases, outer=None):
    """Runs micro-batches like a stage of a zero-bubble pipeline, which reduces at the end; with an adapter, which is
    averaged immediately."""
    model, plain = replicated((2, 2), outer=outer), Tiny()
    for each in (model.mix, plain.mix):
        each.adapter = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        each.register_forward_hook(lambda module, _, y: y * module.adapter)
    policy = rtp_ext.outer_of(model)
    with cases.case("parts of backwards, with an adapter"):
        for micro in range(2):
            with policy.left_for_later():
                batch_loss(model, rank, micro).backward()
            all_losses(plain, ranks, micro).backward()
        assert wrong(whole_gradients(model), plain, 1 / ranks), "control: nothing was left for later"
        policy.reduce()
        assert_same_gradients(whole_gradients(model), plain, "reduced", 1 / ranks)

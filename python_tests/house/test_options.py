"""Options that are words have the types of rtp_ext.words, in the public signatures and in the checks alike."""

import inspect
import re
import subprocess
import sys
import typing

import pytest

import rtp_ext
from rtp_ext import words
from rtp_ext.convert.plan.request import Options, RotateKeywords
from rtp_ext.functional import experts, mlp
from rtp_ext.options import DEFAULTS, RingKeywords, RingOptions
from rtp_ext.ring.links.agree import expect_same_lines

SETS = {name: value for name, value in vars(words).items() if typing.get_origin(value) is typing.Literal}
# Names of things; op and pass_ of a schedule are of a set, but have a table.
FREE = {"name", "link", "title", "op", "pass_"}


def signatures():
    """The public callables, by name, each with its signature."""
    found = {name: getattr(rtp_ext, name) for name in rtp_ext.__all__}
    for package in (rtp_ext.functional, rtp_ext.nn, rtp_ext.outer, rtp_ext.optim, rtp_ext.schedule):
        found |= {f"{package.__name__}.{name}": getattr(package, name) for name in package.__all__}
    for name in ("emulated", "slot_count", "hops", "bytes_sent", "bytes_between_hosts"):
        found[f"Ring.{name}"] = getattr(rtp_ext.Ring, name)
    for name, each in found.items():
        if callable(each) and not (isinstance(each, type) and issubclass(each, (Exception, rtp_ext.RotationPlan))):
            yield name, inspect.signature(each)


def loose(function: str, signature: inspect.Signature) -> list[str]:
    """The parameters with a default that take any string. Annotations are text: modules postpone them."""
    return [
        f"{function}({parameter})"
        for parameter in signature.parameters.values()
        if parameter.default is not parameter.empty
        and parameter.name not in FREE
        and re.fullmatch(r"(bool \| )?str( \| None)?", str(parameter.annotation))
        and (isinstance(parameter.default, str) or "None" in str(parameter.annotation) or parameter.default is True)
    ]


def test_options_that_are_words_have_their_type():
    known = dict(signatures())
    assert {"fully_rotate", "rotate_for_inference", "Ring", "Ring.emulated"} <= known.keys() and len(known) > 60
    assert [text for name, signature in known.items() for text in loose(name, signature)] == []

    def control(route: "str" = "auto", bundle: "bool | str" = True, name: "str" = "x", link: "str | None" = None):
        pass

    assert loose("f", inspect.signature(control)) == ["f(route: 'str' = 'auto')", "f(bundle: 'bool | str' = True)"]


def test_defaults_are_among_the_words():
    seen = set()
    for name, signature in signatures():
        for parameter in signature.parameters.values():
            for kind in re.findall(r"\w+", str(parameter.annotation)):
                if kind in SETS and isinstance(parameter.default, str):
                    seen.add(kind)
                    assert parameter.default in typing.get_args(SETS[kind]), f"{name}({parameter})"
    assert len(seen) > 8


def test_tables_have_an_entry_for_each_word():
    assert tuple(mlp.ACTIVATIONS) == typing.get_args(words.Activation)
    assert tuple(experts._ACTIVATIONS) == typing.get_args(words.ExpertActivation)


@pytest.mark.parametrize("option, kind", [("transport", "Transport"), ("route", "Route"), ("graphs", "Graphs")])
def test_checks_read_the_types(option, kind):
    for word in typing.get_args(SETS[kind]):
        assert getattr(RingOptions(**{option: word}), option) == word
    with pytest.raises(ValueError, match=re.escape(", ".join(typing.get_args(SETS[kind])))):
        RingOptions(**{option: "sideways"})


def _types(record) -> dict[str, str]:
    return {name: getattr(kind, "__forward_arg__", kind) for name, kind in record.__annotations__.items()}


def test_an_option_of_a_ring_is_told_once():
    own = {"timeout", "transport_options"}  # of types of their own, in which a ring keeps them
    given, kept, rotate = _types(RingKeywords), _types(RingOptions), _types(RotateKeywords)
    assert [*given] == [*kept] == [*DEFAULTS]
    assert {name for name in given if given[name] != kept[name]} == own
    assert {name: kind for name, kind in rotate.items() if name in given}.items() <= given.items()
    assert rotate.keys() - given.keys() == _types(Options).keys() - {"ring"}
    text = rtp_ext.Ring.__doc__
    assert [name for name in given if f"\n        {name}: " not in text] == [] and "**options" not in text


def test_annotations_are_those_of_the_signature():
    for function in (rtp_ext.fully_rotate, rtp_ext.explain, rtp_ext.Ring.__init__):
        signature = inspect.signature(function)
        assert {*function.__annotations__} - {"return"} == {*signature.parameters} - {"self"}
        assert "route" in function.__annotations__ and "options" not in function.__annotations__


def test_missing_lines_equal_no_line():
    with pytest.raises(ValueError, match=r"expected nothing \(rank 0\), got nothing on rank 1"):
        expect_same_lines("x", [["a"], ["a", "nothing"]])
    expect_same_lines("x", [["a", "nothing"], ["a", "nothing"]])


def test_unknown_options_are_refused():
    for call in (rtp_ext.Ring, lambda **options: rtp_ext.fully_rotate(None, **options)):
        with pytest.raises(TypeError, match=r"(Ring.__init__|fully_rotate)\(\) got an unexpected keyword"):
            call(to="nowhere")


def test_options_load_no_torch():
    code = "import sys, rtp_ext.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

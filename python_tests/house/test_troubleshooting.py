"""docs/troubleshooting.md quotes a stable part of every message of an error that users can meet.

An entry is a code span in the first column of a table there; "..." in it stands for any text. It covers a message that
has its pieces in this order, and, where the second column names folders, comes from one of them. Messages are read from
the sources: the text of each call of an error class in rtp_ext, and of each check and throw in csrc, with "{}" for
values.
"""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Entries may cover many messages only in this section: those that name the argument and the values that it takes.
ARGUMENTS = "Wrong arguments"
MOST = 8
# Places whose messages users do not meet: path, or the beginning of one, and why.
INTERNAL = {
    "csrc/compute/": "kernels and GEMMs behind operations, which check their operands before",
    "csrc/python/": "names and fields that rtp_ext passes; rtp_ext checks those of users before",
    "csrc/schedule/operations.cpp": "the planner and the ring pass sizes that they have checked",
    "csrc/engine/shards/copied/copied_shards.cpp: expected a place": "offsets that rtp_ext has computed",
    "csrc/engine/shards/host_shards.cpp: expected a place": "offsets that rtp_ext has computed",
    "csrc/engine/shards/shard_source.cpp: expected addresses": "addresses that rtp_ext has exchanged",
    "csrc/transport/shm/host_transport.h: transport shm: expected": "addresses that rtp_ext has exchanged",
    "csrc/transport/tcp/peers.cpp: transport tcp: expected": "addresses that rtp_ext has exchanged",
    "csrc/transport/nccl/nccl.cpp: transport nccl: expected": "ids that rtp_ext has exchanged",
    "csrc/transport/nccl/peer_status.cpp: peer status": "addresses that rtp_ext has exchanged",
    "csrc/transport/nccl/supervised.cpp: expected hosts": "hosts that rtp_ext has counted",
    "csrc/transport/composite/": "hosts that rtp_ext has counted",
    "csrc/transport/checked.cpp: transport checked": "a transport that the ring has made",
    "csrc/transport/c10d.cpp: transport c10d: expected two": "groups that the ring has made",
    "csrc/device/nccl/communicators.cpp: transport: expected": "ids that rtp_ext has exchanged",
    "csrc/transport/record.cpp: a record needs": "every ring has a name",
    "csrc/engine/pass_graph.cpp": "the ring asks for graphs only where they are possible",
    "rtp_ext/dtensor_hooks.py: expected a stage": "a stage of steps that rtp_ext names",
}
# Files with messages whose words stand elsewhere: how many, and words of each; none where another error is repeated.
COMPOSED: dict[str, tuple[int, tuple[str, ...]]] = {
    "rtp_ext/command_line.py": (2, ()),  # of argparse, and of files
    "rtp_ext/convert/agreement.py": (1, ("the model differs between ranks", "ranks have different models")),
    "rtp_ext/convert/modules/refused.py": (3, ("fully_rotate has made it shards",)),
    "rtp_ext/convert/validation/model.py": (1, ("expected a plain parameter, or one whose class has",)),
    "rtp_ext/dtensor_hooks.py": (
        2,
        ("DistributedDataParallel: expected a plain model", "fully_shard: expected a plain module"),
    ),
    "rtp_ext/functional/_call.py": (1, ()),
    "rtp_ext/outer/local_training/after_steps.py": (1, ("a checkpoint would hold a mixture",)),
    "rtp_ext/outer/local_training/optimizers.py": (1, ("a checkpoint would hold a mixture",)),
    "rtp_ext/outer/policy.py": (1, ("the model differs between replicas", "expected the same weights in all replicas")),
    "rtp_ext/planner/app/settings.py": (1, ()),  # of argparse
    "rtp_ext/ring/links/agree.py": (1, ("failed on rank",)),
    "rtp_ext/ring/links/transports.py": (1, ("cannot be used (",)),
    "rtp_ext/ring/telemetry.py": (1, ()),
}
FOREIGN = [("torch", "got mixed torch.Tensor and DTensor")]  # errors of others that have a meaning here
_CHECK = re.compile(
    r"\b(RTP_ASSERT|RTP_CHECK\w*|TORCH_CHECK\w*|throw [\w:]*?(?:\w+Error|RingTimeout|TypeMismatch|runtime_error)"
    r"|(?:RotationError|RingTimeout|NcclError|CudaError))\("
)
ERRORS = re.compile(r"(Error|RingTimeout|WrongResult)$")
COMPARISONS = ("expect_same", "expect_same_lines", "agree")  # of rtp_ext/ring/links/agree.py: the error begins so
WORD = re.compile(r"[a-z]{3}")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def text_of(node: ast.expr) -> str:
    """The constant words of an expression, with "{}" for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) if isinstance(each, ast.Constant) else "{}" for each in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}{{}}{text_of(node.orelse)}"
    return "{}"


def python_messages(file: str, source: str) -> list[tuple[str, str]]:
    """The messages of a Python file, each with the name of the file; without words: ''."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    texts = [text_of(node.args[0]) for node in calls if ERRORS.search(ast.unparse(node.func))]
    compared = [text_of(node.args[0]) for node in calls if ast.unparse(node.func) in COMPARISONS]
    texts += [text for text in compared if WORD.search(text)]
    return [(file, text if WORD.search(text) else "") for text in texts]


def arguments(source: str, start: int) -> list[str]:
    """The arguments of a C++ call whose first character is at `start`."""
    found, depth, at = [""], 1, start
    while depth:
        literal = _LITERAL.match(source, at)
        piece = literal[0] if literal else source[at]
        at += len(piece)
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(piece, 0)
        if piece == "," and depth == 1:
            found.append("")
        elif depth:
            found[-1] += piece
    return found


def native_messages(file: str, source: str) -> list[tuple[str, str]]:
    """The messages of a C++ file, as those of Python."""
    found = []
    source = re.sub(r"^\s*(//|#define).*$", "", source, flags=re.MULTILINE)
    for match in _CHECK.finditer(source):
        parts = arguments(source, match.end())
        if match[1] == "RTP_ASSERT":
            parts = ['"internal error, expected "']
        elif "CHECK" in match[1]:
            parts = parts[1:]
        text = "{}".join(_LITERAL.findall(re.sub(r'"\s*"', "", " ".join(parts))))
        if WORD.search(text):
            found.append((file, text))
    return found


def messages() -> list[tuple[str, str]]:
    found = []
    for file in sorted((ROOT / "rtp_ext").rglob("*.py")):
        found += python_messages(str(file.relative_to(ROOT)), file.read_text())
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix in (".cpp", ".h", ".cu"):
            found += native_messages(str(file.relative_to(ROOT)), file.read_text())
    return found


class Entry(NamedTuple):
    text: str
    section: str
    folders: tuple[str, ...]  # none: messages of all files

    def covers(self, file: str, message: str) -> bool:
        if self.folders and not file.startswith(self.folders):
            return False
        at = 0
        for piece in self.text.split("..."):
            at = message.find(piece, at)
            if at < 0:
                return False
            at += len(piece)
        return True


def entries(page: str) -> list[Entry]:
    """The entries of the page, in its order."""
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        for first, second in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
            folders = tuple(re.findall(r"`((?:rtp_ext|csrc)/[^`]+)`", second))
            found += [Entry(text, section.split("\n", 1)[0], folders) for text in re.findall(r"`([^`]+)`", first)]
    assert len(found) == len(set(found)), "an entry twice"
    return found


def met(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The messages that users can meet, those of COMPOSED and FOREIGN included."""
    own = [(file, text) for file, text in found if text and not any(f"{file}: {text}".startswith(i) for i in INTERNAL)]
    return own + FOREIGN + [(file, text) for file, (_, texts) in COMPOSED.items() for text in texts]


def uncovered(page: str, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The messages that users can meet and that no entry of the page covers."""
    quoted = entries(page)
    return [(file, text) for file, text in met(found) if not any(entry.covers(file, text) for entry in quoted)]


def useless(page: str, found: list[tuple[str, str]]) -> list[str]:
    """The entries that cover no message, or, outside of ARGUMENTS, so many that they do not tell them apart."""
    covered = {entry: {text for file, text in met(found) if entry.covers(file, text)} for entry in entries(page)}
    return [
        entry.text
        for entry, texts in covered.items()
        if not texts or (len(texts) > MOST and entry.section != ARGUMENTS)
    ]


def test_every_message_has_an_entry():
    found = messages()
    assert len(found) > 600 and {file.split("/")[0] for file, _ in found} == {"rtp_ext", "csrc"}
    assert uncovered(PAGE, found) == [], "add an entry to docs/troubleshooting.md"
    assert useless(PAGE, found) == []
    bare = Counter(file for file, text in found if not text)
    assert bare == {file: count for file, (count, _) in COMPOSED.items()}, "messages without words of their own"
    unused = [place for place in INTERNAL if not any(f"{file}: {text}".startswith(place) for file, text in found)]
    assert unused == []


def test_the_words_of_composed_messages_are_in_the_sources():
    sources = [file.read_text() for file in (ROOT / "rtp_ext").rglob("*.py")]
    joined = "".join(re.sub(r'"\s*f?"', "", text) for text in sources)
    assert [text for _, texts in COMPOSED.values() for text in texts if text not in joined] == []


def test_messages_without_an_entry_are_found():
    found = messages()
    row = next(line for line in PAGE.splitlines() if line.startswith("| `did not answer (waited"))
    known = uncovered(PAGE, found)
    missing = {text for file, text in uncovered(PAGE.replace(row, ""), found) if (file, text) not in known}
    assert len(missing) > 2 and all("did not answer (waited" in text for text in missing), missing
    python = 'raise ValueError(f"{name}: expected tea, " f"got {x!r}")\nraise RuntimeError(text)'
    assert python_messages("a.py", python) == [("a.py", "{}: expected tea, got {}"), ("a.py", "")]
    native = """  RTP_CHECK_VALUE(is("tea", f(x)), name, ": expected tea, "
                  "got ", x);
      if (y) throw RotationError(concat("no tea for rank ", rank, "!"));
      // RotationError("in a comment")"""
    assert native_messages("a.cpp", native) == [("a.cpp", ": expected tea, got "), ("a.cpp", "no tea for rank {}!")]
    new = ("rtp_ext/convert/new.py", "{}: expected tea, got {}")
    assert uncovered(PAGE, [new]) == [new]
    assert useless(f"{PAGE}| `expected tea` | a | b |\n", found) == ["expected tea"]
    assert useless(PAGE.replace("`did not answer (waited`", "`expected`"), found) == ["expected"]

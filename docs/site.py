"""Makes a site of the README, the pages of docs/, the examples, and the API reference.

    python docs/site.py --output build/docs --reference rtp_ext rtp_ext.planner      # `make docs`
    python docs/site.py --output build/docs                                          # without the reference: seconds

Exits with status 1 and a list of the links that lead nowhere. Needs pdoc, which brings markdown2 and pygments.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import markdown2
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[1]
# in the order of reading; pages that are not named here come last
FIRST = ("README", "which", "usage", "migration", "troubleshooting", "frameworks", "compile", "outer", "transports")
NEXT = (
    "reliability",
    "numerics",
    "comparison",
    "design",
    "glossary",
    "gpu",
    "planner",
    "app",
    "scale",
    "results",
    "lines",
)
ORDER = (*FIRST, *NEXT, "limits", "development")
REFERENCE = "reference/index.html"
EXTRAS = ["tables", "fenced-code-blocks", "cuddled-lists", "code-friendly"]
STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --accent: #0a6ebd; --block: #8881; }
@media (prefers-color-scheme: dark) { :root { --accent: #6cb6ff; --dim: #aaa; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.55 system-ui, sans-serif; display: flex; min-height: 100vh; }
nav { flex: 0 0 15rem; padding: 1.5rem 1rem; border-right: 1px solid var(--line); font-size: .95rem; }
nav strong { display: block; margin: 1rem 0 .3rem; color: var(--dim); font-weight: 600; }
nav a { display: block; padding: .12rem 0; overflow-wrap: anywhere; } nav a.here { font-weight: 700; }
main { flex: 1 1 auto; min-width: 0; max-width: 62rem; padding: 1.5rem 2rem 4rem; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
pre { padding: .8rem 1rem; overflow-x: auto; background: var(--block); border-radius: .4rem; font-size: .86rem; }
code { font-size: .9em; overflow-wrap: anywhere; } pre code { overflow-wrap: normal; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .35rem .6rem; border: 1px solid var(--line); text-align: left; vertical-align: top; }
img { max-width: 100%; height: auto; background: #fff; }
@media (max-width: 50rem) { body { display: block; } nav { border-right: 0; border-bottom: 1px solid var(--line); }
  nav a { display: inline-block; margin-right: .8rem; } main { padding: 1rem; } }
"""


def anchor(heading: str) -> str:
    """The name that a link gives to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def pages() -> dict[str, Path]:
    """The Markdown of each page, by its name on the site."""
    found = {"README": ROOT / "README.md", **{page.stem: page for page in (ROOT / "docs").glob("*.md")}}
    found["lines"] = ROOT / "benchmarks" / "results" / "README.md"
    known = {name: place for place, name in enumerate(ORDER)}
    return {name: found[name] for name in sorted(found, key=lambda name: (known.get(name, len(known)), name))}


def title_of(text: str) -> str:
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


def file_of(name: str) -> str:
    return "index.html" if name == "README" else f"{name}.html"


def example_file(name: str) -> str:
    return f"example-{Path(name).stem}.html"


def to_html(text: str) -> str:
    """A page of Markdown, its links and images as they are on the site."""
    text = re.sub(r"<!-- .*? -->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\((?:docs/)?(figures/[\w.-]+\.(?:png|svg))\)", r"](\1)", text)
    text = text.replace("](../benchmarks/results/README.md", "](lines.md")
    text = re.sub(r"\]\((?:\.\./|docs/)?([\w-]+)\.md(#[\w-]+)?\)", lambda m: f"]({file_of(m[1])}{m[2] or ''})", text)
    body = str(markdown2.markdown(text, extras=EXTRAS))
    body = re.sub(r"<h(\d)>(.*?)</h\1>", _heading, body)
    body = re.sub(
        r"<code>(examples/(?:[\w-]+/)*([\w-]+)\.py)</code>", r'<a href="example-\2.html"><code>\1</code></a>', body
    )
    return body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")


def _heading(found: re.Match[str]) -> str:
    plain = html.unescape(re.sub(r"<[^>]+>", "", found[2]))
    return f'<h{found[1]} id="{anchor(plain)}">{found[2]}</h{found[1]}>'


def frame(title: str, body: str, here: str, links: list[tuple[str, list[tuple[str, str]]]]) -> str:
    parts = []
    for group, entries in links:
        parts.append(f"<strong>{group}</strong>")
        parts += [
            f'<a href="{to}"{" class=here" if to == here else ""}>{html.escape(name)}</a>' for name, to in entries
        ]
    style = STYLE + HtmlFormatter().get_style_defs(".codehilite")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><nav>{''.join(parts)}</nav><main>{body}</main></body></html>\n"
    )


def build(output: Path, reference: list[str]) -> None:
    """Writes the site. `reference`: modules to document; none: without a reference."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    texts = {name: page.read_text() for name, page in pages().items()}
    examples = sorted((ROOT / "examples").rglob("*.py"))
    titles = {name: "Lines of results" if name == "lines" else title_of(text) for name, text in texts.items()}
    links = [("Pages", [(titles[name], file_of(name)) for name in texts])]
    links.append(("Examples", [(file.name, example_file(file.name)) for file in examples]))
    if reference:
        links.append(("Reference", [("API", REFERENCE)]))
    for name, text in texts.items():
        (output / file_of(name)).write_text(frame(titles[name], to_html(text), file_of(name), links))
    for file in examples:
        code = highlight(file.read_text(), PythonLexer(), HtmlFormatter(cssclass="codehilite"))
        body = f"<h1>{file.name}</h1>{code}"
        (output / example_file(file.name)).write_text(frame(file.name, body, example_file(file.name), links))
    shutil.copytree(ROOT / "docs" / "figures", output / "figures")
    if reference:
        command = [sys.executable, "-m", "pdoc", "--docformat", "google", "--output-directory"]
        subprocess.run([*command, str(output / "reference"), *reference], check=True)


def broken(output: Path) -> list[str]:
    """Links of the site's own pages to files or headings that are not there."""
    texts = {file.name: file.read_text() for file in output.glob("*.html")}
    ids = {name: set(re.findall(r' id="([^"]+)"', text)) for name, text in texts.items()}
    found = []
    for name, text in texts.items():
        for link in re.findall(r' (?:href|src)="([^"]+)"', text):
            target, _, heading = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            missing = target and not (output / target).exists()
            if missing or (heading and heading not in ids.get(target or name, {heading})):
                found.append(f"{name}: {link}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the site of the documentation. See the top of the file.")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--reference", nargs="*", default=[], help="modules")
    args = parser.parse_args()
    build(args.output, args.reference)
    if problems := broken(args.output):
        sys.exit("links that lead nowhere:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()

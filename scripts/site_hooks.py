"""What `make docs` adds to mkdocs: its navigation, the pages at the top of the repository, what Python names are, and the help of
commands.

The navigation is read from docs/index.md, the one list of all pages: a `##` heading is a section, a `###` heading a part of it, and a
link in a list a page. An index.md in a folder brings the pages of that folder that it links to. A page that is in no list fails the
build, and so does one that loads something from elsewhere.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperGroup

import groupwise
from groupwise.cli import main

ROOT = Path(__file__).parents[1]
AT_THE_TOP = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]+)\]\(([\w/.-]+\.md)\)")
TABLE = re.compile(r"^\| name \| meaning \|\n(?:\|.*\n?)+", re.MULTILINE)
COMMANDS = re.compile(r"^(## `([\w -]+)`\n\n)\| command \| does \|\n(?:\|.*\n?)+", re.MULTILINE)
NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
LOADED = re.compile(r"(?:src=|<link [^>]*href=)[\"']https?://[^\"']*")
STYLE = """
.md-typeset .language-console code { white-space: pre-wrap; }
.md-typeset td code { word-break: normal; }
.md-typeset td details { margin: 0; }
.md-typeset table:not([class]) :is(td, th) { padding: 0.6em 0.8em; min-width: 4rem; }
@media (min-width: 76.25em) { .md-grid { max-width: 80rem; } }
.md-typeset .language-text .md-code__nav { display: none; }
@media (max-width: 44.9375em) {
  .md-typeset .language-text code { font-size: min(0.5rem, calc(100vw / (var(--columns, 0) * 0.61 + 2.4))); }
}
"""
"""A command is read whole, without scrolling sideways; names in tables end their lines where CELL's have a break; wide screens have
wider pages; nobody copies a drawing, and on a phone it is small: a letter is 0.61 em wide, and the margins 2.4 em."""
DRAWING = re.compile(r'(<div class="language-text highlight")>(.*?)</pre>', re.DOTALL)
MAX_COLUMNS = 102
"""Widest drawing that is made to fit a phone: of 390 pixels it gives 6 to a letter's height. Wider ones are scrolled sideways."""
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
WORKER = r"""
// Browsers start no worker for a page that was opened from a folder. This one runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.document.write("<body></body>");
      this.inside.document.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
// The search takes - and + before a word, and : ^ ~ in it, for operators. In --dry-run and FILE:NAME they are none.
const sendAsIs = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message) {
  const query = typeof message.data === "string";
  const data = query ? message.data.replace(/(^|[\s"])[-+]+|[:^~]/g, "$1 ") : message.data;
  sendAsIs.call(this, { ...message, data });
};
"""
"""The theme would load such a script from unpkg.com."""
LESS_FOUND = ("decisions/", "correctness.md", "lab-notes/", "python.md", *AT_THE_TOP)
"""Pages that a search shows after the others."""
MORE_FOUND = ("configuration", "commands")
"""Pages that it shows before the others: the names of keys and options are often searched for."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation(Path(config.docs_dir))
    config.extra_css = [*config.extra_css, "site.css"]  # pyright: ignore[reportUnknownMemberType]
    return config


def navigation(docs: Path) -> list[Any]:
    """The `nav` of mkdocs that docs/index.md lists."""
    nav: list[Any] = [{"Home": "index.md"}]
    section = pages = nav
    for line in (docs / "index.md").read_text().splitlines():
        if line.startswith("## "):
            pages = section = []
            nav.append({line[3:]: section})
        elif line.startswith("### "):
            pages = []
            section.append({line[4:]: pages})
        elif line.startswith("- ") and (link := LINK.search(line)):
            title, path = link.groups()
            pages.append({title: folder(docs / path) if path.endswith("/index.md") else path})
    nav.append({"Contribute": list(AT_THE_TOP)})
    return nav


def folder(index: Path) -> list[Any]:
    """That page, and those beside it to which it links, in its order."""
    place = index.parent.name
    links = dict.fromkeys(path for _, path in LINK.findall(index.read_text()) if "/" not in path)
    return [f"{place}/index.md", *(f"{place}/{path}" for path in links)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in AT_THE_TOP:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "site.css", content=STYLE))
    files.append(File.generated(config, "iframe-worker.js", content=WORKER))
    for file in files:
        if file.src_uri.startswith("notebooks/"):  # HTML already, with links to Markdown
            file.content_string = file.content_string.replace('.md"', '.html"')
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links between docs/ and the top of the repository, as they are within the site; python.md with a directive for each of its names,
    commands.md with the help of each command."""
    if page.file.src_uri.startswith(LESS_FOUND):
        page.meta["search"] = {"boost": 0.2}
    if page.file.src_uri.startswith(MORE_FOUND):
        page.meta["search"] = {"boost": 2}
    if page.file.src_uri in AT_THE_TOP:
        return markdown.replace("](docs/", "](")
    up = "../" * page.file.src_uri.count("/")
    for name in AT_THE_TOP:
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{name}")
    if page.file.src_uri == "commands.md":
        return with_help(markdown)
    return described(markdown) if page.file.src_uri == "python.md" else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Long names in tables may be broken after a dot, a slash or an underscore. A drawing says to its style how wide it is."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"([._/:,=]+)(?=\w)", r"\1<wbr>", code[0])

    def measured(drawing: re.Match[str]) -> str:
        text = unescape(re.sub(r"<[^>]*>", "", drawing[2]))
        columns = max(map(len, text.splitlines()), default=0)
        style = f' style="--columns: {columns}"' if columns <= MAX_COLUMNS else ""
        return f"{drawing[1]}{style}>{drawing[2]}</pre>"

    html = DRAWING.sub(measured, html)
    return CELL.sub(lambda cell: re.sub(r"(?<=<code>)[^<]+", breakable, cell[0]), html)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """PluginError if that page would load something from elsewhere."""
    if elsewhere := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {elsewhere[0]}")
    return output


def with_help(markdown: str) -> str:
    """Each table of commands, as sections with their help. A group has its commands further down."""
    program = typer.main.get_command(main.app)
    sections = dict[str, str]()

    def add(words: str, group: Any) -> None:
        sections[words] = ""
        for name, command in main.visible_commands(group):
            if isinstance(command, TyperGroup):
                add(f"{words} {name}", command)
            else:
                context = typer.Context(command, info_name=f"{words} {name}", terminal_width=80)
                help_text = command.get_help(context).replace("```", "")
                sections[words] += f"### `{words} {name}`\n\n```text\n{help_text}\n```\n\n"

    add("groupwise", program)
    return COMMANDS.sub(lambda table: table[1] + sections[table[2]], markdown)


def described(markdown: str) -> str:
    """Each table of names, as directives of mkdocstrings. PluginError if these are not all public names."""
    if different := {*NAME.findall(markdown)} ^ ({*groupwise.__all__} - {"__version__"}):
        raise PluginError(f"docs/python.md lists other names than groupwise.__all__: {different}")

    def directives(table: re.Match[str]) -> str:
        names = NAME.findall(table[0])
        places = (f"{getattr(groupwise, name).__module__}.{name}" for name in names)
        return "\n\n".join(f"::: {place}" for place in places) + "\n"

    return TABLE.sub(directives, markdown)

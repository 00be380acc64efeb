"""Hooks of MkDocs for the site (mkdocs.yml): what the pages need that plain Markdown does not have.

- The list of decision records in the navigation is read from the folder.
- Links to files of the repository outside docs/ lead to the repository's page.
- `<!-- every flag -->` becomes a table of all flags, made from the table that parses them.
- `<!-- api: NAME -->` becomes the entry of mkdocstrings for this name. A forge hides the comment.
- Search finds decision records after all other pages, and short code does not break.
- No page asks another host: the theme would ask GitHub about the repository.
- GitHub's Markdown differs from Python-Markdown: list items are indented by two spaces, a list may
  follow a line of text, and `|` is escaped in the code of a table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DECISIONS = "decisions/"
EVERY_FLAG = "<!-- every flag -->"
API = re.compile(r"^<!-- api: ([\w.]+) -->$", re.M)
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(\))")
LIST = re.compile(r"^(?![-*] |[|#>\s]|\d+\. )(.+)\n(?=[-*] )", re.M)
"""A line of text and a list that follows it."""
SHORT = re.compile(r"<code>([^<\s]{1,32})</code>")
CODE = re.compile(r"(^```.*?^```|^ *```.*?^ *```|`[^`\n]*`)", re.M | re.S)


class _TwoSpaces(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2


def on_config(config: Any) -> Any:
    """Fill in the list of decision records, and set the indentation of lists."""
    records = sorted(f"{DECISIONS}{path.name}" for path in (DOCS / DECISIONS).glob("*.md"))
    for section in config["nav"]:
        for name, entries in section.items():
            if isinstance(entries, list):
                section[name] = [
                    {"Decisions": records} if entry == {"Decisions": DECISIONS} else entry
                    for entry in entries
                ]
    config["markdown_extensions"].append(_TwoSpaces())
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill in generated tables, and point links outside docs/ to the repository."""
    if page.file.src_uri.startswith(DECISIONS):
        page.meta.setdefault("search", {"boost": 0.2})
    if EVERY_FLAG in markdown:
        markdown = markdown.replace(EVERY_FLAG, every_flag())
    markdown = API.sub(r"::: \1\n", markdown)
    folder = (DOCS / page.file.src_uri).parent
    parts = CODE.split(markdown)
    parts[::2] = [
        LINK.sub(lambda found: _link(found, folder, config["repo_url"]), LIST.sub(r"\1\n\n", part))
        for part in parts[::2]
    ]
    parts[1::2] = [part.replace("\\|", "|") for part in parts[1::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Keep short code such as a flag on one line."""
    return SHORT.sub(r'<code class="whole">\1</code>', html)


def on_post_page(output: str, **_: Any) -> str:
    """Take the mark off the link to the repository that makes the theme ask GitHub."""
    return output.replace(' data-md-component="source"', "")


def _link(found: re.Match[str], folder: Path, repository: str) -> str:
    """The link as it is, if its file is a part of the site or does not exist (then MkDocs says
    so)."""
    target = (folder / found[2]).resolve()
    if not target.is_relative_to(ROOT) or not target.exists():
        return found[0]
    if target.is_relative_to(DOCS) and target.is_file():
        return found[0]
    kind = "tree" if target.is_dir() else "blob"
    path = target.relative_to(ROOT).as_posix()
    return f"{found[1]}{repository}/{kind}/main/{path}{found[3] or ''}{found[4]}"


def every_flag() -> str:
    """A table for each group of flags: names, default, variable, origin, help."""
    from elasticrun.cli.table import FLAGS, GROUPS

    lines = []
    for group, title in GROUPS.items():
        flags = [flag for flag in FLAGS if flag.group == group]
        if not flags:
            continue
        lines += [f"### {title[0].upper()}{title[1:]}", ""]
        lines += ["| flag | default | variable | from | meaning |", "|---|---|---|---|---|"]
        for flag in flags:
            names = ", ".join(f"`{name}`" for name in (flag.short, flag.name) if name)
            value = "\\|".join(flag.choices) or flag.metavar
            if value:
                names += f" {_cell(value)}"
            default = "" if flag.default in (None, "", False) else f"{flag.default:}"
            variable = f"`{flag.variable}`" if flag.variable else ""
            cells = (names, _cell(default), variable, flag.origin, _cell(flag.help))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    escaped = text.replace("\\|", "|").replace("|", "&#124;")
    return escaped.replace("<", "&lt;").replace("$", "&#36;").replace("*", "&#42;")

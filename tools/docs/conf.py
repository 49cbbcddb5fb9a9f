"""How Sphinx reads the pages and docstrings of the yard."""

import inspect
import re
from typing import Any

from sphinx.domains.python import PyXRefRole  # pyrefly: ignore
from sphinx.ext.napoleon import GoogleDocstring  # pyrefly: ignore
from sphinx.util.nodes import make_refnode  # pyrefly: ignore

import shared

project = "Meshyard"
version = release = shared.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Pages: every heading down to the fourth level can be linked to.
myst_heading_anchors = 4

# Docstrings: what stands in single backticks is code, and a link where it is a described name.
default_role = "py:name"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch's own texts are torch's
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # they stand in the class's signature

smartquotes = False  # quotation marks stand around values

html_theme = "furo"
html_title = "Meshyard"
html_copy_source = False
html_show_copyright = False  # the licence says whose it is
# A page opened from a folder may not fetch others, which summaries of search results would need.
html_show_search_summary = False


class Name(PyXRefRole):
    """A name as it stands: `.npy` is no attribute of something, and `receive()` keeps its brackets."""

    explicit_title_re = re.compile(r"(?!)")  # `step-<n>` is no title with a target

    def process_link(
        self, env: Any, refnode: Any, has_explicit_title: bool, title: str, target: str
    ) -> tuple[str, str]:
        """Looks the whole text up, in the module and class around it first."""
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, target


def read_docstring(
    app: Any, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    """Corrects what a docstring is taken for, before napoleon reads it.

    A constructor's docstring, which describes its arguments, follows that of its class. Napoleon takes
    what stands before a colon, in the first line of a property or of what is returned, for a type;
    autodoc takes a class's docstring for that of a constant which has none.
    """
    if isinstance(value, type):
        constructor = vars(value).get("__init__")
        lines += ["", *inspect.cleandoc(getattr(constructor, "__doc__", None) or "").split("\n")]
    for number in reversed(range(len(lines) - 1)):
        if lines[number].strip() in {"Returns:", "Yields:"}:
            text = lines[number + 1]
            lines.insert(number + 1, text[: len(text) - len(text.lstrip())] + "\\")
    if what == "property":
        docstring = GoogleDocstring(lines, app.config, app, "method", name, value, options)
        lines[:] = ["", *docstring.lines()]
    elif what == "data" and "\n".join(lines).strip() == (inspect.getdoc(type(value)) or "").strip():
        lines.clear()


def leave_out(
    app: Any, what: str, name: str, value: object, skip: bool, options: Any
) -> bool | None:
    """Leaves out the fields of named tuples, which their class's docstring describes."""
    return True if (inspect.getdoc(value) or "").startswith("Alias for field number") else None


def write_signature(
    app: Any, what: str, name: str, value: object, options: Any, signature: str | None, result: str
) -> tuple[str | None, str]:
    """Writes three dots for a field that is made anew, which is no Python as dataclasses write it."""
    return signature and signature.replace("<factory>", "..."), result


def look_up_exactly(app: Any, doctree: Any) -> None:
    """Lets types in signatures link to what they name, and never to another thing of that name.

    Sphinx guesses where a reference only has the attribute `refspecific`, whatever its value.
    """
    for node in doctree.findall(lambda node: getattr(node, "tagname", "") == "pending_xref"):
        if not node.get("refspecific", True):
            del node["refspecific"]


def find_class(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Links the name of a class, or of its member, that another module of the package describes."""
    package, name = str(node.get("py:module")).partition(".")[0], node["reftarget"]
    if node.get("reftype") != "name" or not name[:1].isupper():
        return None
    found = {
        (entry.docname, entry.node_id)
        for path, entry in env.domains["py"].objects.items()
        if path.startswith(f"{package}.") and path.endswith(f".{name}")
    }
    if len(found) != 1:
        return None
    ((page, anchor),) = found
    return make_refnode(app.builder, node["refdoc"], page, anchor, content, name)


def setup(app: Any) -> None:
    """Adds these to Sphinx."""
    app.add_role_to_domain("py", "name", Name())
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("doctree-read", look_up_exactly)
    app.connect("missing-reference", find_class)
